"""The faults of tests/faults in their cheapest form: one moment each, on few images."""

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import deltalake
import pytest
import torch

from tasks.cache.materialize import materialize_cache
from tasks.config.distributed import DistributedConfig
from tasks.config.promotion import PromoteConfig, RollbackConfig
from tasks.errors import DiskFull, TrackingUnavailable, WrongInput
from tasks.etl.ingest import ingest_images
from tasks.launch.launcher import launch_ranks
from tasks.predict import batch
from tasks.refs import TableRef
from tasks.registry.aliases import CHAMPION, check_predicts
from tasks.registry.promote import promote_best
from tasks.registry.rollback import roll_back
from tasks.spark.gateway import SparkFailed
from tasks.spark.session import spark_session
from tasks.tracking.models import model_with_alias, set_alias, version_tags
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.concurrent_runs import find_waiting_run, ingest_changing_source, start_two_runs
from tests.builders.disks import mounted_disk
from tests.builders.etl_and_cache import CACHE, SPARK, make_storage, run, settings
from tests.builders.killed_inference import predict_into, predicted, run_inference
from tests.builders.killed_promotions import STAGES, copied, prepare, run_and_kill, state_of
from tests.builders.killed_runs import (
    VICTIMS,
    UndisturbedRun,
    damaged_caches,
    end_run,
    kill_in,
    killing_workers,
    leftovers,
    run_and_read,
    run_to_end,
    run_undisturbed,
)
from tests.builders.killed_training import TRAIN, launch_and_kill, logged_epochs, own_ranks, runs_beside, runs_in
from tests.builders.tracking_server import TrackingServer
from tests.builders.training_runs import weights
from tests.builders.untrained_model import log_run, predict
from tests.faults.conftest import draw_for


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory) -> UndisturbedRun:
    """Return a source, and the contents of tables and cache after an undisturbed run on it."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=25)


def test_full_or_read_only_disk_is_one_line_and_keeps_no_part_of_a_table(undisturbed, tmp_path) -> None:
    """Read-only disks are rejected, full ones reported; a disk that fills while a cache is built is in tests/faults."""
    with mounted_disk(tmp_path / "disk", make_storage(tmp_path / "home"), kilobytes=60) as disk:
        disk.remount("ro")
        with pytest.raises(WrongInput, match=r"storage.tables is '.*', .* \(Read-only"):
            ingest_images(settings(undisturbed.source), disk.storage, SPARK)
        with pytest.raises(WrongInput, match=r"storage.cache is '.*', .* \(Read-only"):
            materialize_cache(CACHE, TableRef(path="nowhere", version=0), disk.storage, SPARK)
        disk.remount("rw")
        assert list(disk.folder.iterdir()) == []

        with pytest.raises(DiskFull, match=r"a disk was full .*/tables' has [\d.]+ MB") as raised:
            ingest_images(settings(undisturbed.source), disk.storage, SPARK)
        assert "\n" not in str(raised.value)
        assert disk.files_that_stay() == []


@pytest.mark.fault
def test_session_survives_killed_workers_and_the_next_run_stores_changed_files(undisturbed, tmp_path) -> None:
    """Of three runs in one session, the first fails, the second skips changed files, and the third has all files."""
    source, storage = shutil.copytree(undisturbed.source, tmp_path / "source"), make_storage(tmp_path / "home")

    with killing_workers(), pytest.raises(SparkFailed, match="^a Python worker of Spark was killed"):
        run(undisturbed.source, storage)

    with spark_session(SPARK, storage):
        num_listed, num_stored = ingest_changing_source(source, storage)
        contents = run_and_read(source, storage)
    # Of the three files that change, the missing one is not stored.
    assert num_listed - 3 <= num_stored < num_listed
    assert contents.duplicate_images() == []
    assert contents.without_splits() == undisturbed.contents.without_splits()
    # Images of two runs are assigned to splits in another order: the fractions still hold to within one image.
    sizes, expected = contents.split_sizes(), undisturbed.contents.split_sizes()
    assert all(abs(sizes[key] - expected[key]) <= 1 for key in sizes.keys() | expected.keys()), (sizes, expected)
    assert leftovers(storage) == []


@pytest.mark.fault
def test_run_after_two_concurrent_killed_runs_equals_undisturbed_run(undisturbed, tmp_path) -> None:
    """Of two runs at once, the first loses its driver in ETL, and the second its JVM while it builds the cache."""
    storage = make_storage(tmp_path / "home")
    started = start_two_runs(undisturbed.source, storage, seconds_apart=0)
    waiting = find_waiting_run(started)
    assert waiting is not None, [run.log.read_text() for run in started]
    first, second = started[1 - waiting], started[waiting]
    assert kill_in(first, "driver", "reading", storage, seconds=0), first.log.read_text()
    is_second_killed = kill_in(second, "jvm", "building", storage, seconds=0)
    ended_first, ended_second = end_run(first), end_run(second)
    assert is_second_killed, ended_second.output
    assert ended_first.returncode == -signal.SIGKILL, ended_first.output
    assert ended_first.left_running == ended_second.left_running == []
    assert damaged_caches(storage) == []

    again = run_to_end(undisturbed.source, storage)

    assert again.returncode == 0, again.output
    assert again.left_running == []
    assert leftovers(storage) == []
    contents = run_and_read(undisturbed.source, storage)
    assert contents.duplicate_images() == []
    assert contents == undisturbed.contents


def test_promotion_and_rollback_after_a_kill_equal_undisturbed_ones(storage, tmp_path, request) -> None:
    """Each is killed once at a random moment; twenty moments of each are in tests/faults."""
    prepared, draw = prepare(storage, tmp_path), draw_for(request.node.name)
    for stage in ("promote", "rollback"):
        expected = copied(prepared.storages[stage], tmp_path / f"undisturbed-{stage}")
        STAGES[stage](expected, prepared.run)
        storage = copied(prepared.storages[stage], tmp_path / stage)
        run_and_kill(stage, storage, prepared.run, draw.uniform(0, 1))
        champion = model_with_alias(storage, "photos", CHAMPION)
        assert "lakevision.decision" in version_tags(storage, champion)
        check_predicts(storage, champion, "the champion")

        STAGES[stage](storage, prepared.run)

        assert state_of(storage) == state_of(expected)


@pytest.mark.fault
def test_inference_after_a_kill_completes_the_predictions(spark, source, storage, tmp_path, request) -> None:
    """The driver, the JVM or a Python worker is killed at a random moment; twenty moments are in tests/faults."""
    ingest_images(settings(source), storage, SPARK)
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], PromoteConfig(), storage)
    predict_into(tmp_path / "undisturbed", storage)
    expected, draw = predicted(tmp_path / "undisturbed"), draw_for(request.node.name)
    assert len(expected) == 60
    _, killed, ended = run_inference(tmp_path / "killed", storage, draw.choice([*VICTIMS]), draw.uniform(0, 6))
    assert killed or ended.returncode == 0, ended.output
    assert ended.left_running == []
    assert predicted(tmp_path / "killed") in ([], expected)

    predict_into(tmp_path / "killed", storage)

    assert predicted(tmp_path / "killed") == expected


def test_full_disk_keeps_champion_and_predictions(spark, source, storage, tmp_path) -> None:
    """A promotion and an inference without room for predictions fail in one line; with room, both are completed."""
    with mounted_disk(tmp_path / "disk", storage, kilobytes=20_000) as disk:
        ingest_images(settings(source), disk.storage, SPARK)
        runs = [log_run(disk.storage, tmp_path, seed, accuracy=0.5) for seed in (1, 2)]
        any_figures = PromoteConfig(min_accuracy_gain=-1.0, max_recall_drop=1.0)
        before = promote_best(runs[:1], any_figures, disk.storage).champion
        for work in (
            lambda: promote_best(runs[1:], any_figures, disk.storage),
            lambda: predict(disk.storage),
        ):
            disk.leave_free(kilobytes=4)
            with pytest.raises(DiskFull, match=r"a disk was full .*/predictions' has [\d.]+ MB") as full:
                work()
            assert "\n" not in str(full.value)
            assert model_with_alias(storage, before.name, CHAMPION) == before
            assert predicted(Path(disk.storage.table("predictions"))) == []
            disk.remount("size=20m")
        made = promote_best(runs[1:], any_figures, disk.storage)
        assert (made.outcome, made.champion.version) == ("promoted", 2)
        report = predict(disk.storage)
        assert report.predicted == 60 - made.comparison.images
        assert len({row[:2] for row in predicted(Path(report.predictions.path))}) == 60 + made.comparison.images


def test_registry_that_goes_away_is_one_line_and_the_next_run_completes(
    spark, source, storage, tmp_path, monkeypatch
) -> None:
    """The server does not answer at the start of a run, or is killed before the alias moves or the model is sent."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    ingest_images(settings(source), storage, SPARK)
    first, second = (log_run(storage, tmp_path, seed, accuracy=0.5) for seed in (1, 2))
    named = PromoteConfig(model_name="photos", min_accuracy_gain=-1.0, max_recall_drop=1.0)
    promote_best([first], named, storage)
    closed = storage.model_copy(update={"tracking": "http://127.0.0.1:9"})
    away = r"^the tracking server 'http://127.0.0.1:\d+' "
    for work in (
        lambda: promote_best([second], named, closed),
        lambda: roll_back(RollbackConfig(model_name="photos"), closed),
        lambda: predict(closed, "photos"),
    ):
        with pytest.raises(TrackingUnavailable, match=away):
            work()
    with TrackingServer(storage.tracking, tmp_path / "server.log") as server:
        remote = storage.model_copy(update={"tracking": server.url})

        def kill_first(function: Callable[..., object]) -> Callable[..., object]:
            def killed(*arguments: object) -> object:
                server.kill()
                return function(*arguments)

            return killed

        with monkeypatch.context() as patched:
            patched.setattr("tasks.tracking.models.set_alias", kill_first(set_alias))
            with pytest.raises(TrackingUnavailable, match=away):
                promote_best([second], named, remote)
        assert model_with_alias(storage, "photos", CHAMPION).run_id == first.run_id
        server.start()
        assert promote_best([second], named, remote).outcome == "promoted"
        with monkeypatch.context() as patched:
            patched.setattr(batch, "send_package", kill_first(batch.send_package))
            with pytest.raises(TrackingUnavailable, match=away):
                predict(remote, "photos")
    report = predict(storage, "photos")
    assert (report.model.version, report.errors) == (2, 0)
    decided = deltalake.DeltaTable(storage.table("promotions")).to_pyarrow_table().sort_by("decided_at").to_pylist()
    assert [(row["decision"], row["to_version"]) for row in decided] == [("promoted", 1), ("promoted", 2)]
    rows = predicted(Path(storage.table("predictions")))
    assert len({row[:2] for row in rows if row[1] == 2}) == len([row for row in rows if row[1] == 2]) == 60


def test_run_killed_at_a_random_moment_equals_undisturbed_run(cache, storage, make_home, tmp_path, request) -> None:
    """The kill is in a step, a checkpoint or a validation; two ranks and more moments are in tests/faults."""
    other = make_home("other")
    undisturbed = train_model(TrainingSpec(train=TRAIN, cache=cache, storage=other))
    spec = TrainingSpec(train=TRAIN, distributed=None, cache=cache, storage=storage)

    assert "was ended by signal 9" in launch_and_kill(spec, draw_for(request.node.name)).message
    epochs: list[int] = []
    resumed_run = train_model(
        TrainingSpec(train=TRAIN, cache=cache, storage=storage), on_epoch=lambda metrics: epochs.append(metrics.epoch)
    )

    assert 0 not in epochs
    resumed, expected = weights(resumed_run, storage, tmp_path), weights(undisturbed, other, tmp_path)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert logged_epochs(resumed_run, storage) == list(range(TRAIN.max_epochs))
    assert runs_beside(resumed_run, storage) == [(resumed_run.run_id, "FINISHED")]
    assert not list(storage.checkpoints.glob("*/*.pt"))
    assert own_ranks() == []


@pytest.mark.fault
def test_stopped_rank_ends_all_and_the_resumed_run_equals_the_undisturbed_one(
    cache, storage, make_home, tmp_path, request
) -> None:
    """The error names the rank, and the MLflow run has ended; killed ranks and more moments are in tests/faults."""
    distributed = DistributedConfig(num_ranks=2, stall_timeout_seconds=10)
    spec = TrainingSpec(train=TRAIN, distributed=distributed, cache=cache, storage=storage)
    own = make_home("stopped")
    again = spec.model_copy(update={"storage": own})
    expected = weights(launch_ranks(spec), storage, tmp_path)

    victim = launch_and_kill(again, draw_for(request.node.name), number=signal.SIGSTOP, rank=1)

    message = r"^rank 1 has reported nothing for 1. s, since .*; distributed.stall_timeout_seconds is 10"
    assert re.search(message, victim.message)
    assert victim.seconds < 25
    assert own_ranks() == []
    assert [status for _run_id, status in runs_in(own)] in (["KILLED"], ["FAILED"])
    run = launch_ranks(again)
    resumed = weights(run, own, tmp_path)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert runs_beside(run, own) == [(run.run_id, "FINISHED")]
