"""The faults of tests/faults in their cheapest form: one moment each, on few images."""

import shutil
import signal

import pytest
import torch

from tasks.cache.materialize import materialize_cache
from tasks.errors import DiskFull, WrongInput
from tasks.etl.ingest import ingest_images
from tasks.refs import TableRef
from tasks.spark.failure import SparkFailed
from tasks.spark.session import spark_session
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.concurrent_runs import find_waiting_run, ingest_changing_source, start_two_runs
from tests.builders.disks import mounted_disk
from tests.builders.etl_and_cache import CACHE, SPARK, make_storage, run, settings
from tests.builders.killed_runs import (
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
from tests.builders.killed_training import TRAIN, launch_and_kill, logged_epochs, own_ranks, runs_beside
from tests.builders.training_runs import weights
from tests.faults.conftest import draw_for


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory) -> UndisturbedRun:
    """Return a source, and the contents of tables and cache after an undisturbed run on it."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), per_class=25)


def test_full_or_read_only_disk_is_one_line_and_keeps_no_part_of_a_table(undisturbed, tmp_path) -> None:
    """Read-only disks are rejected, full ones reported; a disk that fills while a cache is built is in tests/faults."""
    with mounted_disk(tmp_path / "disk", make_storage(tmp_path / "home"), kilobytes=60) as disk:
        disk.remount("ro")
        with pytest.raises(WrongInput, match=r"storage.tables is '.*', where nothing can be written \(Read-only"):
            ingest_images(settings(undisturbed.source), disk.storage, SPARK)
        with pytest.raises(WrongInput, match=r"storage.cache is '.*', where nothing can be written \(Read-only"):
            materialize_cache(CACHE, TableRef(path="nowhere", version=0), disk.storage, SPARK)
        disk.remount("rw")
        assert list(disk.folder.iterdir()) == []

        with pytest.raises(DiskFull, match=r"a disk was full .*'.*/tables' has [\d.]+ MB free") as raised:
            ingest_images(settings(undisturbed.source), disk.storage, SPARK)
        assert "\n" not in str(raised.value)
        assert disk.files_that_stay() == []


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


def test_run_killed_at_a_random_moment_equals_undisturbed_run(cache, storage, tmp_path, request) -> None:
    """The kill is in a step, a checkpoint or a validation; two ranks and more moments are in tests/faults."""
    other = make_storage(tmp_path / "other")
    undisturbed = train_model(TrainingSpec(train=TRAIN, cache=cache, storage=other))
    spec = TrainingSpec(train=TRAIN, distributed=None, cache=cache, storage=storage)

    assert "was ended by signal 9" in launch_and_kill(spec, draw_for(request.node.name))
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
