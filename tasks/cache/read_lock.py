"""The read lock of a cache: a shared file lock beside it, released at the latest when the process ends."""

import fcntl
import logging
import os
import weakref
from pathlib import Path
from typing import Self

from tasks.paths import local_path

logger = logging.getLogger("lakevision.cache")


def lock_file(url: str) -> Path | None:
    """Return the lock file of a local cache, whose modification time is the time of last use; None if not local."""
    path = local_path(url)
    return None if path is None else path.with_name(f"{path.name}.used")


class CacheReadLock:
    """A shared lock on a cache, held from construction until `close` or the end of the process.

    A cache on an object store is not locked, as no sweep removes it; neither is one in a read-only folder.
    """

    def __init__(self, url: str) -> None:
        self._release: weakref.finalize[[int], CacheReadLock] | None = None
        file = lock_file(url)
        if file is None or not file.parent.is_dir():
            return
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # Not `__del__`, which at the interpreter's exit may find that `os` is gone.
            self._release = weakref.finalize(self, os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(file)
        except OSError as error:
            logger.debug("%s is read without a lock: %s", url, error)

    def close(self) -> None:
        """Release the lock."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
