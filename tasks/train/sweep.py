"""Removal of old checkpoints of abandoned training runs."""

import logging
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import filelock

from tasks.train.checkpoint_files import FINISHED, remove_checkpoints

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
        for file in (launch_lock(folder), training_lock(folder)):
            lock = filelock.FileLock(file)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                return False  # The run trains, or is about to start.
            stack.callback(lock.release)
        days = _idle_days(folder, now)
        if days <= keep_days:
            return False  # The run has just ended.
        removed = [remove_checkpoints(folder / FINISHED), remove_checkpoints(folder)]
        for emptied in (folder / FINISHED, folder):
            with suppress(OSError):  # A folder with other files stays.
                emptied.rmdir()
        had_any = any(removed)
        if had_any:
            logger.info("%s removed: its training run was last active %.0f days ago", folder, days)
        # The lock files stay: another process may be waiting for one, and would not notice its replacement.
        return had_any
