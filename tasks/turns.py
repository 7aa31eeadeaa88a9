"""Runs that write to the same place take turns, by a lock that ends with its process, however that ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import filelock

from tasks.storage import local_path

logger = logging.getLogger("lakevision.turns")


@contextmanager
def take_turn(url: str) -> Iterator[bool]:
    """Have a local place to ourselves; say whether another run had it, so that it is no longer as it was found.

    The lock file beside it stays: one that another process waits for must not be replaced by a new one of its name.
    An object store has no lock: what writes there must bear others.

    Args:
        url: Folder or URL, which need not be there.
    """
    path = local_path(url)
    if path is None:
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
        waited = False
    except filelock.Timeout:
        logger.info("another run writes to %s: waiting until it ends", url)
        lock.acquire()
        waited = True
    try:
        yield waited
    finally:
        lock.release()
