"""Two runs at once with the same tables and cache, and a run on a source that changes."""

import shutil
from pathlib import Path

import pytest

from tasks.spark.session import spark_session
from tests.builders.concurrent_runs import ingest_changing_source, start_two_runs
from tests.builders.etl_and_cache import SPARK, make_storage
from tests.builders.killed_runs import end_run, leftovers, run_and_read


@pytest.mark.parametrize("number", range(2))
def test_two_runs_at_once_commit_tables_once_and_build_cache_once(undisturbed, tmp_path, draw, number) -> None:
    """Two runs, started up to 6 s apart so that they meet at different stages, leave one version of everything."""
    storage = make_storage(tmp_path / "home")

    started = start_two_runs(undisturbed.source, storage, seconds_apart=draw.uniform(0, 6) * number)
    ended = [end_run(run) for run in started]

    outputs = [run.output for run in ended]
    assert [run.returncode for run in ended] == [0, 0], outputs
    assert [run.left_running for run in ended] == [[], []]
    for name in ("images", "files"):
        assert [path.name for path in Path(storage.table(name)).glob("_delta_log/*.json")] == [f"{0:020}.json"]
    assert sum(" rows, val " in output for output in outputs) == 1, "both built the cache"
    contents = run_and_read(undisturbed.source, storage)
    assert contents.duplicate_images() == []
    assert contents == undisturbed.contents
    assert leftovers(storage) == []


def test_files_that_change_during_a_run_are_stored_by_the_next_run(undisturbed, tmp_path) -> None:
    """A run on changing files stores the others; the next run stores the changed files too."""
    source, storage = shutil.copytree(undisturbed.source, tmp_path / "source"), make_storage(tmp_path / "home")

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
