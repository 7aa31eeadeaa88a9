"""Files of checkpoints: their names, and their removal, also of those of abandoned training runs."""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from tasks.system.locks import lock_if_free

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


logger = logging.getLogger("lakevision.train")

KEY = re.compile(r"[0-9a-f]{16}")
"""Name of the folder of a training run: its key."""

DAY_SECONDS = 86_400


def launch_lock(folder: Path) -> Path:
    """Return the file that a launcher locks from before its ranks start until they end."""
    return folder.with_name(f"{folder.name}.launch.lock")


def training_lock(folder: Path) -> Path:
    """Return the file that rank 0 locks while it trains."""
    return folder.with_name(f"{folder.name}.lock")


def sweep_checkpoints(checkpoints: Path, keep_days: int, now: float | None = None) -> list[str]:
    """Remove the checkpoints of training runs whose newest checkpoint is older than `keep_days`.

    A finished run has removed its own, except for the last one if more epochs can continue it. Others belong to runs
    that diverged or were not resumed. A run that trains or is about to start holds a lock and is skipped.

    Args:
        checkpoints: Folder of the checkpoints of all training runs; it may be missing.
        keep_days: Days after the newest checkpoint; 0 removes nothing.
        now: Seconds since 1970; None is the current time.

    Returns:
        Keys of the training runs whose checkpoints were removed.
    """
    if keep_days == 0 or not checkpoints.is_dir():
        return []
    now = time.time() if now is None else now
    removed = []
    for folder in sorted(path for path in checkpoints.iterdir() if KEY.fullmatch(path.name) and path.is_dir()):
        try:
            if _idle_days(folder, now) > keep_days and _remove(folder, keep_days, now):
                removed.append(folder.name)
        except OSError as error:  # Another user's folder, or removed concurrently: not a reason to fail.
            logger.warning("%s is kept: %s", folder, error)
    return removed


def _idle_days(folder: Path, now: float) -> float:
    # The folder counts too: removing a file changes its time, as writing one does.
    written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return (now - written) / DAY_SECONDS


def _remove(folder: Path, keep_days: int, now: float) -> bool:
    with ExitStack() as stack:
        locks = (launch_lock(folder), training_lock(folder))
        if not all(stack.enter_context(lock_if_free(file)) for file in locks):
            return False  # The run trains, or is about to start.
        days = _idle_days(folder, now)
        if days <= keep_days:
            return False  # The run has just ended.
        removed = [remove_checkpoints(folder / FINISHED), remove_checkpoints(folder)]
        for emptied in (folder / FINISHED, folder):
            with suppress(OSError):  # A folder with other files stays.
                emptied.rmdir()
        if any(removed):
            logger.info("%s removed: its training run was last active %.0f days ago", folder, days)
        return any(removed)
