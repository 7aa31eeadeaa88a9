"""Old caches and what killed builds left, removed: never a cache in use, never one that is being built.

Only local folders are swept, and in them only what has the name of a cache. Object stores have rules of their own.
"""

import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import filelock
import fsspec

from tasks.cache.manifest import MANIFEST, CacheManifest
from tasks.cache.read_lock import lock_file
from tasks.config.cache import CacheConfig
from tasks.paths import local_path

logger = logging.getLogger("lakevision.cache")

CACHE_NAME = re.compile(r"[0-9a-f]{16}")
SWEPT_NAME = re.compile(r"\.[0-9a-f]{16}\.swept-[0-9a-f]{32}")

DAY_SECONDS = 86_400


class _Held(NamedTuple):
    last_used: float
    path: Path
    bytes: int


def sweep_caches(folder: str, cache: CacheConfig, now: float | None = None) -> list[str]:
    """Remove what killed builds left, then whole caches by age, then by size, the longest unused first.

    A cache stays while a reader holds it or a builder has it, and for a day after its last use in any case: between
    the build and the training that it was built for nobody holds it.

    Args:
        folder: Folder or URL of the caches.
        cache: `keep_days` and `keep_gigabytes`.
        now: Seconds since 1970; None is now.

    Returns:
        Names of the folders that were removed.
    """
    root = local_path(folder)
    if root is None or not root.is_dir() or not os.access(root, os.W_OK):
        return []
    now = time.time() if now is None else now
    removed, whole = [], []
    for path in sorted(root.iterdir()):
        if SWEPT_NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # A sweep was killed; another one may be at it as well.
        elif CACHE_NAME.fullmatch(path.name) and path.is_dir():
            if (path / MANIFEST).exists():
                with suppress(FileNotFoundError):  # Another run's sweep was quicker.
                    whole.append(_held(path))
            elif _remove(path, half_built=True):
                removed.append(path.name)
    total = sum(held.bytes for held in whole)
    allowed = None if cache.keep_gigabytes is None else cache.keep_gigabytes * 1e9
    for held in sorted(whole):
        idle_days = (now - held.last_used) / DAY_SECONDS
        too_old = cache.keep_days > 0 and idle_days > cache.keep_days
        too_much = allowed is not None and total > allowed
        if idle_days > 1 and (too_old or too_much) and _remove(held.path, half_built=False):
            removed.append(held.path.name)
            total -= held.bytes
            logger.info("%s removed: %.1f GB, unused for %.0f days", held.path, held.bytes / 1e9, idle_days)
    return removed


def discard(url: str) -> None:
    """Remove the folder of a cache that we have to ourselves, if it is there."""
    path = local_path(url)
    if path is None:
        filesystem, root = fsspec.core.url_to_fs(url)
        if filesystem.exists(root):
            filesystem.rm(root, recursive=True)
    elif path.exists():
        # Gone in one step: a reader finds a whole cache or none, also when this is killed half-way, and a Spark task
        # that outlives its job has no folder to write to.
        swept = path.with_name(f".{path.name}.swept-{uuid.uuid4().hex}")
        path.rename(swept)
        shutil.rmtree(swept, ignore_errors=True)  # Another run's sweep may be at it as well; the next one ends it.


def remove_unnamed(url: str, manifest: CacheManifest) -> None:
    """Remove files that no manifest names from a cache just built: what Spark tasks that were tried again left."""
    root = local_path(url)
    if root is None:
        return
    named = {file.name for split in manifest.splits.values() for file in split.files} | {MANIFEST}
    for path in root.iterdir():
        if path.name not in named:
            path.unlink()


def _held(path: Path) -> _Held:
    used = lock_file(str(path))
    marks = [file.stat().st_mtime for file in (path / MANIFEST, used) if file is not None and file.exists()]
    return _Held(max(marks, default=0.0), path, sum(file.stat().st_size for file in path.iterdir()))


@contextmanager
def _nobody_reads(path: Path) -> Iterator[bool]:
    """Say whether no reader holds the cache, and let none in meanwhile."""
    file = lock_file(str(path))
    assert file is not None
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _remove(path: Path, *, half_built: bool) -> bool:
    """Remove a cache that nobody builds or reads; say whether it was."""
    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False  # Its builder lives.
    try:
        with _nobody_reads(path) as free:
            if not free or not path.exists() or (half_built and (path / MANIFEST).exists()):
                return False
            discard(str(path))
            path.with_name(f"{path.name}.used").unlink(missing_ok=True)
        return True
    finally:
        # The lock file stays: one that another process waits for must not be replaced by a new one of its name.
        lock.release()
