"""Checkpoints on a full disk: a warning is logged, and the previous checkpoint is kept."""

import errno
import io
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from tasks.train.checkpoint import CONTENT, Checkpoints
from tasks.train.progress import EarlyStopping, Progress

LARGE = 200_000
"""Bytes of the weights, more than a file buffer, so that they are written directly."""


class SmallDisk:
    """Disk with `room` bytes over all files; when they are used up, each write fails."""

    def __init__(self, room: int, code: int) -> None:
        self.room = room
        self.code = code

    def open(self, path: Path) -> IO[bytes]:
        """Open a file for buffered writing, as Path.open does."""
        return io.BufferedWriter(_FileOn(self, path))


class _FileOn(io.FileIO):
    """File on a small disk; a write is cut to the remaining room, as by the operating system."""

    def __init__(self, disk: SmallDisk, path: Path) -> None:
        super().__init__(path, "wb")
        self._disk = disk

    def write(self, content: Any) -> int:
        """Write the part that fits on the disk; return its length."""
        if self._disk.room == 0:
            raise OSError(self._disk.code, os.strerror(self._disk.code))
        written = super().write(memoryview(content)[: self._disk.room])
        self._disk.room -= written
        return written


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Checkpoints of a training run, with one checkpoint, of epoch 1."""
    checkpoints = Checkpoints(tmp_path, keep=2, config={"train": {"seed": 1}})
    assert save(checkpoints, 1)
    return checkpoints


@pytest.fixture
def limit_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that limits the disk to the given number of free bytes."""

    def limit(room: int, code: int = errno.ENOSPC) -> None:
        disk = SmallDisk(room, code)
        monkeypatch.setattr("tasks.train.checkpoint.Path.open", lambda path, _mode: disk.open(path))

    return limit


def save(checkpoints: Checkpoints, epoch: int) -> bool:
    """Save a checkpoint of an epoch, which is the best one so far."""
    weights = {"weight": torch.full((LARGE // 4,), float(epoch))}
    progress = Progress(EarlyStopping(2, 0.0, higher_is_better=True, best_epoch=epoch - 1), next_epoch=epoch)
    progress.best_state = weights
    parts = {"running": asdict(progress.running), "stopping": asdict(progress.stopping), "history": []}
    content = dict.fromkeys(CONTENT) | parts | {"model": weights, "next_epoch": epoch}
    return checkpoints.save(content, progress, "run")


def newest_epoch(folder: Path) -> int:
    """Return the epoch that another process would resume from."""
    checkpoints = Checkpoints(folder, keep=2, config={})
    name, _content = checkpoints.newest()
    assert name is not None
    content = checkpoints.load(name)
    epoch: int = content["next_epoch"]
    assert torch.equal(content["best_state"]["weight"], torch.full((LARGE // 4,), float(epoch)))
    return epoch


# In the header, among the weights of the best epoch, at their end, and in the checkpoint that names them.
@pytest.mark.parametrize("room", [0, 100, LARGE // 2, LARGE + 200, LARGE * 3 // 2, LARGE * 2 + 1000])
def test_full_disk_is_logged_and_keeps_the_previous_checkpoint(
    checkpoints: Checkpoints,
    limit_disk: Callable[..., None],
    tmp_path: Path,
    messages_of: Callable[[str], list[str]],
    room: int,
) -> None:
    """The previous checkpoint is kept at whatever byte the disk is full, and no partial file is left."""
    limit_disk(room)
    assert not save(checkpoints, 2)

    assert messages_of("lakevision.train") == [
        f"no checkpoint was written, the disk of '{tmp_path}' is full: training continues, "
        "the previous checkpoint is kept"
    ]
    assert not list(tmp_path.glob("*.partial"))
    assert newest_epoch(tmp_path) == 1


@pytest.mark.parametrize("room", [LARGE // 2, LARGE * 3 // 2])
def test_checkpoint_is_written_once_the_disk_has_room(
    checkpoints: Checkpoints, limit_disk: Callable[..., None], tmp_path: Path, room: int
) -> None:
    """The next checkpoint is complete, whether or not the best weights were written before."""
    limit_disk(room)
    assert not save(checkpoints, 2)
    limit_disk(10 * LARGE)
    assert save(checkpoints, 2)

    assert newest_epoch(tmp_path) == 2


@pytest.mark.parametrize("room", [0, LARGE // 2, LARGE * 3 // 2])
def test_other_disk_fault_is_raised(
    checkpoints: Checkpoints, limit_disk: Callable[..., None], tmp_path: Path, room: int
) -> None:
    """A broken disk ends training, and the previous checkpoint is kept."""
    limit_disk(room, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as raised:
        save(checkpoints, 2)

    assert raised.value.errno == errno.EIO
    assert not list(tmp_path.glob("*.partial"))
    assert newest_epoch(tmp_path) == 1
