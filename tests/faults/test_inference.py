"""Batch inference whose driver, JVM or Python worker is killed at random moments."""

import signal

import pytest

from tasks.config.promotion import PromoteConfig
from tasks.registry.promote import promote_best
from tasks.spark.session import spark_session
from tests.builders.etl_and_cache import make_storage
from tests.builders.etl_tables import ingest
from tests.builders.killed_inference import SPARK, predict_into, predicted, run_inference
from tests.builders.killed_runs import VICTIMS
from tests.builders.untrained_model import log_run
from tests.faults.conftest import at_most

ROUNDS = at_most(20)


@pytest.mark.timeout(2400)
def test_run_after_a_kill_completes_the_predictions(make_images, tmp_path, draw) -> None:
    """A kill leaves all rows of a commit or none; the next run has each image once, as an undisturbed run."""
    storage = make_storage(tmp_path / "home")
    num_killed = 0
    with spark_session(SPARK, storage):
        ingest(make_images(per_class=50), storage)
        promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], PromoteConfig(), storage)
        took, _, ended = run_inference(tmp_path / "undisturbed", storage)
        assert ended.returncode == 0, ended.output
        expected = predicted(tmp_path / "undisturbed")
        assert len({sha256 for sha256, *_ in expected}) == len(expected) == 150
        for number in range(ROUNDS):
            victim, predictions = [*VICTIMS][number % len(VICTIMS)], tmp_path / f"predictions-{number}"
            lasted, killed, ended = run_inference(predictions, storage, victim, draw.uniform(0, took))
            num_killed += killed
            took = took if killed else lasted  # On a machine with other work, the duration changes.
            assert ended.left_running == []
            if killed and victim == "driver":
                assert ended.returncode == -signal.SIGKILL
            if not killed:
                assert ended.returncode == 0, ended.output
            assert predicted(predictions) in ([], expected)

            report = predict_into(predictions, storage)

            assert report.errors == 0
            assert predicted(predictions) == expected
            assert predict_into(predictions, storage).predicted == 0
    assert num_killed > ROUNDS / 2
