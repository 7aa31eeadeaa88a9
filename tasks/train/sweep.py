"""Checkpoints of trainings that were given up, removed by age: never those of one that trains or is about to."""

import logging
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import filelock

from tasks.train.checkpoint_files import remove_checkpoints

logger = logging.getLogger("lakevision.train")

KEY = re.compile(r"[0-9a-f]{16}")
"""What the folder of a training is called."""

DAY_SECONDS = 86_400


def launch_lock(folder: Path) -> Path:
    """Return the file that a launcher locks from before its ranks start to their end."""
    return folder.with_name(f"{folder.name}.launch.lock")


def training_lock(folder: Path) -> Path:
    """Return the file that rank 0 locks while it trains."""
    return folder.with_name(f"{folder.name}.lock")


def sweep_checkpoints(checkpoints: Path, keep_days: int, now: float | None = None) -> list[str]:
    """Remove the checkpoints of trainings whose last one is older than `keep_days`.

    A training that ended well has removed its own. What is left is of one that diverged, or that nobody ran again.

    Args:
        checkpoints: Folder of the checkpoints of all trainings; it need not be there.
        keep_days: Days after the last checkpoint; 0 removes nothing.
        now: Seconds since 1970; None is now.

    Returns:
        Keys of the trainings whose checkpoints were removed.
    """
    if keep_days == 0 or not checkpoints.is_dir():
        return []
    now = time.time() if now is None else now
    removed = []
    for folder in sorted(path for path in checkpoints.iterdir() if KEY.fullmatch(path.name) and path.is_dir()):
        try:
            if _idle_days(folder, now) > keep_days and _remove(folder, keep_days, now):
                removed.append(folder.name)
        except OSError as error:  # Somebody else's, or gone meanwhile: no training ends for that.
            logger.warning("%s is kept: %s", folder, error)
    return removed


def _idle_days(folder: Path, now: float) -> float:
    # A file that is removed changes the folder's time as one that is written does.
    written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return (now - written) / DAY_SECONDS


def _remove(folder: Path, keep_days: int, now: float) -> bool:
    with ExitStack() as stack:
        for file in (launch_lock(folder), training_lock(folder)):
            lock = filelock.FileLock(file)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                return False  # It trains, or is about to.
            stack.callback(lock.release)
        days = _idle_days(folder, now)
        if days <= keep_days:
            return False  # It has trained until this moment.
        had_any = remove_checkpoints(folder)
        with suppress(OSError):  # What is not ours stays, and the folder with it.
            folder.rmdir()
        if had_any:
            logger.info("%s removed: its training was left %.0f days ago", folder, days)
        # The lock files stay: one that another process waits for must not be replaced by a new one of its name.
        return had_any
