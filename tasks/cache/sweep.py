"""Read locks of caches, and removal of old caches and of leftovers of killed builds.

A cache that is in use or being built is never removed.

Only local folders are swept, and in them only folders named like a cache. Object stores have lifecycle rules.
"""

import fcntl
import logging
import os
import re
import shutil
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tasks.cache.manifest import MANIFEST, CacheManifest
from tasks.config.cache import CacheConfig
from tasks.object_store import file_system
from tasks.paths import local_path
from tasks.system.locks import excludes_other_machines, lock_if_free

logger = logging.getLogger("lakevision.cache")

CACHE_NAME = re.compile(r"[0-9a-f]{16}")
SWEPT_NAME = re.compile(r"\.[0-9a-f]{16}\.swept-[0-9a-f]{32}")

DAY_SECONDS = 86_400

ABANDONED_SECONDS = 7 * DAY_SECONDS
"""Age of a file after which no build is writing it, where file locks do not exclude all writers."""


class _CacheUse(NamedTuple):
    last_used: float
    path: Path
    bytes: int


def sweep_caches(folder: str, cache_config: CacheConfig, now: float | None = None) -> list[str]:
    """Remove leftovers of killed builds, then complete caches by age and by total size, least recently used first.

    A cache that is locked by a reader or a builder stays. So does every cache for a day after its last use: it is not
    locked between its build and the training run that it was built for.

    Args:
        folder: Folder or URL of the caches.
        cache_config: `keep_days` and `keep_gigabytes`.
        now: Seconds since 1970; None is now.

    Returns:
        Names of the folders that were removed.
    """
    root = local_path(folder)
    if root is None or not root.is_dir() or not os.access(root, os.W_OK):
        return []
    now = time.time() if now is None else now
    removed, complete = [], []
    for path in sorted(root.iterdir()):
        if SWEPT_NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # Left by a killed sweep; a concurrent one may remove it as well.
        elif CACHE_NAME.fullmatch(path.name) and path.is_dir():
            if (path / MANIFEST).exists():
                with suppress(FileNotFoundError):  # Removed by another run's sweep.
                    complete.append(_cache_use(path))
            elif _remove(path, half_built=True):
                removed.append(path.name)
    total = sum(use.bytes for use in complete)
    allowed = None if cache_config.keep_gigabytes is None else cache_config.keep_gigabytes * 1e9
    for use in sorted(complete):
        idle_days = (now - use.last_used) / DAY_SECONDS
        too_old = cache_config.keep_days > 0 and idle_days > cache_config.keep_days
        too_much = allowed is not None and total > allowed
        if idle_days > 1 and (too_old or too_much) and _remove(use.path, half_built=False):
            removed.append(use.path.name)
            total -= use.bytes
            logger.info("%s removed: %.1f GB, unused for %.0f days", use.path, use.bytes / 1e9, idle_days)
    return removed


def discard(url: str) -> None:
    """Remove the folder of a cache that is not complete, if it exists; the caller holds its exclusive lock.

    Where file locks do not exclude all writers, as on a store, another run may be building the same cache, under other
    names. Its files stay.
    """
    path = local_path(url)
    if path is not None and path.exists() and excludes_other_machines(url):
        _remove_folder(path)


def _remove_folder(path: Path) -> None:
    # Atomic: a reader finds a complete cache or none, even if this process is killed here. A Spark task that outlives
    # its job has no folder to write to.
    swept = path.with_name(f".{path.name}.swept-{uuid.uuid4().hex}")
    path.rename(swept)
    shutil.rmtree(swept, ignore_errors=True)  # A concurrent sweep may remove it as well; the next one finishes it.


def remove_unnamed(url: str, manifest: CacheManifest) -> None:
    """Remove files that the manifest does not name from a new cache: leftovers of retried Spark tasks.

    Where file locks do not exclude all writers, another run may be building the same cache: only files older than
    ABANDONED_SECONDS are removed.
    """
    named = {file.name for split in manifest.splits.values() for file in split.files} | {MANIFEST}
    filesystem, root = file_system(url)
    is_alone, abandoned = excludes_other_machines(url), time.time() - ABANDONED_SECONDS
    for found in filesystem.find(root):
        if found.rsplit("/", 1)[-1] in named:
            continue
        if is_alone or filesystem.modified(found).timestamp() < abandoned:
            filesystem.rm_file(found)


def _cache_use(path: Path) -> _CacheUse:
    times = [file.stat().st_mtime for file in (path / MANIFEST, _lock_file(path)) if file.exists()]
    return _CacheUse(max(times, default=0.0), path, sum(file.stat().st_size for file in path.iterdir()))


@contextmanager
def _readers_excluded(path: Path) -> Iterator[bool]:
    """Try to acquire the read lock exclusively; yield whether it was acquired."""
    descriptor = os.open(_lock_file(path), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _is_abandoned(path: Path) -> bool:
    """Return whether a folder without a manifest is that of a killed build; the caller holds its file lock."""
    if (path / MANIFEST).exists():
        return False
    times = [file.stat().st_mtime for file in (path, *path.iterdir())]
    return excludes_other_machines(str(path)) or max(times) < time.time() - ABANDONED_SECONDS


def _remove(path: Path, *, half_built: bool) -> bool:
    """Remove a cache unless it is being built or read; return whether it was removed."""
    with ExitStack() as held:
        if not held.enter_context(lock_if_free(f"{path}.lock")) or not held.enter_context(_readers_excluded(path)):
            return False  # It is being built, or read.
        if not path.exists() or (half_built and not _is_abandoned(path)):
            return False
        _remove_folder(path)
        _lock_file(path).unlink(missing_ok=True)
    return True


def _lock_file(path: Path) -> Path:
    """Return the lock file of a local cache, whose modification time is the time of last use."""
    return path.with_name(f"{path.name}.used")


class CacheReadLock:
    """A shared lock on a cache, held from construction until `close` or the end of the process.

    A cache on an object store is not locked, as no sweep removes it; neither is one in a read-only folder.
    """

    def __init__(self, url: str) -> None:
        self._release: weakref.finalize[[int], CacheReadLock] | None = None
        path = local_path(url)
        if path is None or not path.parent.is_dir():
            return
        file = _lock_file(path)
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
