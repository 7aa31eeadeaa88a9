"""File names of checkpoints, and their removal."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PARTIAL, UNREADABLE = ".partial", ".unreadable"

FINISHED = "finished"
"""Folder within that of a training run, for the last checkpoint of a finished run that more epochs can continue."""

_NAME = re.compile(r"step-\d{2,}-(\d{6,})-(\d{12,})\+.*\.pt")


def checkpoint_name(phase: int, epoch: int, image: int) -> str:
    """Return the name of a checkpoint, without the file of its best weights; names sort by position.

    Args:
        phase: Number of the phase.
        epoch: Number of the running epoch, or of the next one.
        image: Images of this epoch that were trained on, over all ranks.
    """
    return f"step-{phase:02d}-{epoch:06d}-{image:012d}"


def files_of(name: str) -> list[str]:
    """Return the names of a checkpoint's files, in the order in which they are written.

    Args:
        name: Name of the checkpoint, of which the file of its best weights is a part; it may have none.
    """
    best = name.partition("+")[2]
    return [name] if best == ".pt" else [best, name]


@contextmanager
def written_at_once(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which has its name once the block has ended without an error, and else is removed.

    Its content is on the disk then: a kill or a loss of power leaves the whole file or none.
    """
    partial = path.with_suffix(PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def newest_position(folder: Path) -> tuple[int, int] | None:
    """Return epoch and image of the newest checkpoint, by the name of its file; None without a checkpoint."""
    names = sorted(path.name for path in folder.glob("step-*.pt"))
    found = _NAME.fullmatch(names[-1]) if names else None
    return None if found is None else (int(found[1]), int(found[2]))


def keep_finished(folder: Path) -> None:
    """Move the newest checkpoint of a training run that is finished, and remove the others."""
    names = sorted(path.name for path in folder.glob("step-*.pt"))
    if names:
        (folder / FINISHED).mkdir(exist_ok=True)
        for name in files_of(names[-1]):
            with suppress(FileNotFoundError):  # Damaged: the run has finished from the weights in memory.
                os.replace(folder / name, folder / FINISHED / name)
    remove_checkpoints(folder)


def remove_checkpoints(folder: Path) -> bool:
    """Remove all checkpoints of a finished or abandoned training run; return whether there were any.

    A checkpoint that `keep_finished` has moved stays.
    """
    found = [*folder.glob("*.pt"), *folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{UNREADABLE}")]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)
