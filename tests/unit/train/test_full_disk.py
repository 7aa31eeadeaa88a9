"""A disk that is full at a checkpoint: it is told, and the checkpoint before it stays."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from tasks.train.checkpoint import Checkpoints
from tasks.train.early_stopping import EarlyStopping
from tasks.train.progress import Progress

LARGE = 200_000
"""Bytes of the weights, more than a file's buffer holds: they are written at once, and leave nothing in it."""


class SmallDisk:
    """Room for so many bytes, of all files opened after another; then each write fails."""

    def __init__(self, room: int, code: int) -> None:
        self.room = room
        self.code = code

    def open(self, path: Path) -> IO[bytes]:
        """Open a file to write as Path.open does, buffered."""
        return io.BufferedWriter(_FileOn(self, path))


class _FileOn(io.FileIO):
    """A file on a small disk: what there is room for is written, as the system does."""

    def __init__(self, disk: SmallDisk, path: Path) -> None:
        super().__init__(path, "wb")
        self._disk = disk

    def write(self, content: Any) -> int:
        """Write what there is room for."""
        if self._disk.room == 0:
            raise OSError(self._disk.code, os.strerror(self._disk.code))
        written = super().write(memoryview(content)[: self._disk.room])
        self._disk.room -= written
        return written


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Return those of a training that has one, of epoch 1."""
    made = Checkpoints(tmp_path, keep=2, config={"train": {"seed": 1}})
    assert save(made, 1)
    return made


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return what leaves so many bytes on the disk."""

    def leave(room: int, code: int = errno.ENOSPC) -> None:
        disk = SmallDisk(room, code)
        monkeypatch.setattr("tasks.train.checkpoint.Path.open", lambda path, _mode: disk.open(path))

    return leave


def save(checkpoints: Checkpoints, epoch: int) -> bool:
    """Save the checkpoint of an epoch that is the best one so far."""
    weights = {"weight": torch.full((LARGE // 4,), float(epoch))}
    progress = Progress(EarlyStopping(2, 0.0, higher_is_better=True, best_epoch=epoch - 1), next_epoch=epoch)
    progress.best_state = weights
    return checkpoints.save({"model": weights, "next_epoch": epoch}, progress, "run")


def newest_epoch(folder: Path) -> int:
    """Return what another process would go on from."""
    checkpoints = Checkpoints(folder, keep=2, config={})
    name, _run = checkpoints.newest()
    assert name is not None
    content = checkpoints.load(name)
    epoch: int = content["next_epoch"]
    assert torch.equal(content["best_state"]["weight"], torch.full((LARGE // 4,), float(epoch)))
    return epoch


# In the header, among the weights of the best epoch, at their end, and in the checkpoint that names them.
@pytest.mark.parametrize("room", [0, 100, LARGE // 2, LARGE + 200, LARGE * 3 // 2, LARGE * 2 + 1000])
def test_a_full_disk_keeps_the_checkpoint_before_and_is_told(
    checkpoints: Checkpoints, fill: Callable[..., None], tmp_path: Path, messages_of: Callable[[str], list[str]], room: int
) -> None:
    """Wherever in the file it is full; no part of one stays."""
    fill(room)
    assert not save(checkpoints, 2)

    assert messages_of("lakevision.train") == [
        f"no checkpoint was written, the disk of '{tmp_path}' is full: the training goes on, the previous one is good"
    ]
    assert not list(tmp_path.glob("*.partial"))
    assert newest_epoch(tmp_path) == 1


@pytest.mark.parametrize("room", [LARGE // 2, LARGE * 3 // 2])
def test_with_room_again_the_checkpoint_is_written_whole(
    checkpoints: Checkpoints, fill: Callable[..., None], tmp_path: Path, room: int
) -> None:
    """Whether the weights of the best epoch were on the disk already or not."""
    fill(room)
    assert not save(checkpoints, 2)
    fill(10 * LARGE)
    assert save(checkpoints, 2)

    assert newest_epoch(tmp_path) == 2


@pytest.mark.parametrize("room", [0, LARGE // 2, LARGE * 3 // 2])
def test_another_fault_of_the_disk_is_raised_as_what_it_is(
    checkpoints: Checkpoints, fill: Callable[..., None], tmp_path: Path, room: int
) -> None:
    """A training does not go on for days on a disk that is broken; the checkpoint before stays all the same."""
    fill(room, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as raised:
        save(checkpoints, 2)

    assert raised.value.errno == errno.EIO
    assert not list(tmp_path.glob("*.partial"))
    assert newest_epoch(tmp_path) == 1
