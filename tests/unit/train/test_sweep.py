"""What is removed of trainings that were given up, and what never is."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from tasks.train.sweep import launch_lock, sweep_checkpoints, training_lock

DAY = 86_400
NOW = 1_700_000_000.0
OLD, NEWER, NEW = "0" * 16, "1" * 16, "2" * 16
LEFT = (
    "step-00-000003-000000000014+best-00-000002.pt",
    "step-00-000003-000000000007+best-00-000002.unreadable",
    "best-00-000002.pt",
    "step-00-000004-000000000000.partial",
)


def give_up(checkpoints: Path, key: str, days_ago: float) -> Path:
    """Make what a training leaves that diverged so many days ago."""
    folder = checkpoints / key
    folder.mkdir()
    for path in (*(folder / name for name in LEFT), folder):
        path.touch()
        os.utime(path, (NOW - days_ago * DAY,) * 2)
    return folder


def names(checkpoints: Path) -> set[str]:
    """Return the folders that are left."""
    return {path.name for path in checkpoints.iterdir() if path.is_dir()}


def test_checkpoints_of_trainings_given_up_long_ago_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages_of: Callable[[str], list[str]]
) -> None:
    """With what could not be read of them and what was half written; 0 keeps all."""
    for key, days in ((OLD, 31), (NEWER, 29), (NEW, 0)):
        give_up(tmp_path, key, days)

    assert sweep_checkpoints(tmp_path, 0, NOW) == []
    with caplog.at_level("INFO", "lakevision.train"):
        assert sweep_checkpoints(tmp_path, 30, NOW) == [OLD]
    assert names(tmp_path) == {NEWER, NEW}
    assert {path.name for path in (tmp_path / NEWER).iterdir()} == set(LEFT)
    assert messages_of("lakevision.train") == [f"{tmp_path / OLD} removed: its training was left 31 days ago"]
    assert sweep_checkpoints(tmp_path, 30, NOW) == []


def test_the_last_checkpoint_counts_and_not_the_first(tmp_path: Path) -> None:
    """A training of weeks keeps its best weights of long ago, too."""
    folder = give_up(tmp_path, OLD, 40)
    os.utime(folder / LEFT[0], (NOW - DAY,) * 2)

    assert sweep_checkpoints(tmp_path, 30, NOW) == []
    assert {path.name for path in folder.iterdir()} == set(LEFT)


@pytest.mark.parametrize("lock_of", [launch_lock, training_lock])
def test_a_training_that_runs_or_is_about_to_keeps_its_own(tmp_path: Path, lock_of) -> None:  # type: ignore[no-untyped-def]
    """However old: it is what it goes on from."""
    folder = give_up(tmp_path, OLD, 400)

    with filelock.FileLock(lock_of(folder)):
        assert sweep_checkpoints(tmp_path, 30, NOW) == []
        assert {path.name for path in folder.iterdir()} == set(LEFT)
    assert sweep_checkpoints(tmp_path, 30, NOW) == [OLD]


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Folders of other names, files, and what somebody laid beside a checkpoint."""
    assert sweep_checkpoints(tmp_path / "gone", 30) == []
    for name in ("mine", "0" * 15, "G" * 16):
        (tmp_path / name).mkdir()
    (tmp_path / NEW).write_text("a file")
    note = give_up(tmp_path, OLD, 0) / "note.txt"
    note.write_text("why it diverged")

    assert sweep_checkpoints(tmp_path, 30, time.time() + 400 * DAY) == [OLD]
    assert names(tmp_path) == {"mine", "0" * 15, "G" * 16, OLD}
    assert list((tmp_path / OLD).iterdir()) == [note]
    assert sweep_checkpoints(tmp_path, 30, time.time() + 800 * DAY) == []
