"""Who uses a cache: readers hold a shared lock beside it, which ends with their process, however that ends."""

import fcntl
import logging
import os
from pathlib import Path
from typing import Self

from tasks.paths import local_path

logger = logging.getLogger("lakevision.cache")


def lock_file(url: str) -> Path | None:
    """Return the file beside a local cache whose lock says that it is read, and whose time says when it last was."""
    path = local_path(url)
    return None if path is None else path.with_name(f"{path.name}.used")


class CacheReadLock:
    """A shared lock on a cache, from its making until `close` or the end of the process.

    A cache on an object store has none: nothing of ours removes it. Where the folder is read-only nobody sweeps it.
    """

    def __init__(self, url: str) -> None:
        self._descriptor: int | None = None
        file = lock_file(url)
        if file is None or not file.parent.is_dir():
            return
        try:
            self._descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            os.utime(file)
        except OSError as error:
            logger.debug("%s is read without a lock: %s", url, error)

    def close(self) -> None:
        """Let go of the cache."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
