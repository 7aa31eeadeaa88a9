"""Removal of the checkpoints of abandoned training runs, and the files that are kept."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from tasks.train.checkpoint_files import keep_finished, launch_lock, sweep_checkpoints, training_lock

DAY = 86_400
NOW = 1_700_000_000.0
OLD, NEWER, NEW = "0" * 16, "1" * 16, "2" * 16
FILES = (
    "step-00-000003-000000000014+best-00-000002.pt",
    "step-00-000003-000000000007+best-00-000002.unreadable",
    "best-00-000002.pt",
    "step-00-000004-000000000000.partial",
)


def abandon_run(checkpoints: Path, key: str, days_ago: float) -> Path:
    """Create the files of a run that diverged the given number of days ago."""
    folder = checkpoints / key
    folder.mkdir()
    for path in (*(folder / name for name in FILES), folder):
        path.touch()
        os.utime(path, (NOW - days_ago * DAY,) * 2)
    return folder


def names(checkpoints: Path) -> set[str]:
    """Return the names of the folders."""
    return {path.name for path in checkpoints.iterdir() if path.is_dir()}


def test_checkpoints_of_old_abandoned_runs_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages_of: Callable[[str], list[str]]
) -> None:
    """Damaged and partial files are removed too, and keep_days 0 keeps everything."""
    for key, days in ((OLD, 31), (NEWER, 29), (NEW, 0)):
        abandon_run(tmp_path, key, days)

    assert sweep_checkpoints(tmp_path, 0, NOW) == []
    with caplog.at_level("INFO", "lakevision.train"):
        assert sweep_checkpoints(tmp_path, 30, NOW) == [OLD]
    assert names(tmp_path) == {NEWER, NEW}
    assert {path.name for path in (tmp_path / NEWER).iterdir()} == set(FILES)
    assert messages_of("lakevision.train") == [
        f"{tmp_path / OLD} removed: its training run was last active 31 days ago"
    ]
    assert sweep_checkpoints(tmp_path, 30, NOW) == []


def test_last_checkpoint_of_a_finished_run_is_kept_as_long_as_others(tmp_path: Path) -> None:
    """Only the newest checkpoint is kept, with its best weights, in a folder of its own that is swept like others."""
    folder = abandon_run(tmp_path, OLD, 0)
    (folder / "step-00-000002-000000000000+best-00-000001.pt").touch()
    (folder / "best-00-000001.pt").touch()

    for _end in range(2):  # Again, for a process that was killed after it had finished the run.
        keep_finished(folder)
        assert [path.name for path in folder.iterdir()] == ["finished"]
        assert {path.name for path in (folder / "finished").iterdir()} == {FILES[0], FILES[2]}
    for path in (*(folder / "finished").iterdir(), folder / "finished", folder):
        os.utime(path, (NOW - 31 * DAY,) * 2)
    assert sweep_checkpoints(tmp_path, 32, NOW) == []
    assert sweep_checkpoints(tmp_path, 30, NOW) == [OLD]
    assert names(tmp_path) == set()


def test_age_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """Old best weights are kept while a newer checkpoint exists."""
    folder = abandon_run(tmp_path, OLD, 40)
    os.utime(folder / FILES[0], (NOW - DAY,) * 2)

    assert sweep_checkpoints(tmp_path, 30, NOW) == []
    assert {path.name for path in folder.iterdir()} == set(FILES)


@pytest.mark.parametrize("lock_of", [launch_lock, training_lock])
def test_checkpoints_of_a_locked_run_are_kept(tmp_path: Path, lock_of) -> None:  # type: ignore[no-untyped-def]  # a fixture
    """A run that trains or is about to start keeps its checkpoints of any age."""
    folder = abandon_run(tmp_path, OLD, 400)

    with filelock.FileLock(lock_of(folder)):
        assert sweep_checkpoints(tmp_path, 30, NOW) == []
        assert {path.name for path in folder.iterdir()} == set(FILES)
    assert sweep_checkpoints(tmp_path, 30, NOW) == [OLD]


def test_files_other_than_checkpoints_are_kept(tmp_path: Path) -> None:
    """Folders with other names, plain files, and other files beside a checkpoint are not removed."""
    assert sweep_checkpoints(tmp_path / "missing", 30) == []
    for name in ("mine", "0" * 15, "G" * 16):
        (tmp_path / name).mkdir()
    (tmp_path / NEW).write_text("a file")
    note = abandon_run(tmp_path, OLD, 0) / "note.txt"
    note.write_text("why it diverged")

    assert sweep_checkpoints(tmp_path, 30, time.time() + 400 * DAY) == [OLD]
    assert names(tmp_path) == {"mine", "0" * 15, "G" * 16, OLD}
    assert list((tmp_path / OLD).iterdir()) == [note]
    assert sweep_checkpoints(tmp_path, 30, time.time() + 800 * DAY) == []
