"""The faults of tests/faults, each in its cheapest form: one moment each, on few images."""

import pytest

from tasks.launch.spec import RankSpec
from tasks.train.run import train_model
from tests.builders.concurrent_runs import check_changing_source, check_killed_in_company
from tests.builders.disks import check_full_in_etl, check_read_only, mounted_disk
from tests.builders.etl_and_cache import make_storage
from tests.builders.killed_runs import Undisturbed, check_killed_workers, run_undisturbed
from tests.builders.killed_training import TRAIN, check_made_good, launch_and_kill
from tests.faults.conftest import draw_for


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory) -> Undisturbed:
    """Run once undisturbed."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=25)


def test_a_full_or_read_only_disk_is_one_sentence_and_leaves_nothing(undisturbed, tmp_path) -> None:
    """Read-only, then full for the tables; a disk that fills while the cache is built is in tests/faults."""
    with mounted_disk(tmp_path / "disk", make_storage(tmp_path / "home"), kilobytes=60) as disk:
        check_read_only(disk, undisturbed.source)
        check_full_in_etl(disk, undisturbed.source)


def test_killed_python_workers_and_files_that_change_while_they_are_read_spoil_nothing(undisturbed, tmp_path) -> None:
    """Of the runs, the first fails, the second leaves out what changed, and the third has everything."""
    check_killed_workers(undisturbed.source, make_storage(tmp_path / "home"))
    check_changing_source(undisturbed, tmp_path)


def test_two_runs_at_once_that_are_killed_are_made_good_by_a_third(undisturbed, tmp_path) -> None:
    """The driver of the one in ETL, then the JVM of the other, in materialisation."""
    check_killed_in_company(undisturbed, tmp_path / "home")


def test_a_training_killed_at_a_random_moment_ends_like_an_undisturbed_one(cache, storage, tmp_path, request) -> None:
    """In a step, a checkpoint or a validation in an epoch; two ranks and more moments are in tests/faults."""
    other = make_storage(tmp_path / "other")
    undisturbed = train_model(TRAIN, cache, other)
    spec = RankSpec(train=TRAIN, distributed=None, cache=cache, storage=storage)

    assert "was ended by signal 9" in launch_and_kill(spec, draw_for(request.node.name))
    epochs: list[int] = []
    run = train_model(TRAIN, cache, storage, on_epoch=lambda metrics: epochs.append(metrics.epoch))

    assert 0 not in epochs
    check_made_good(run, storage, undisturbed, other, tmp_path)
