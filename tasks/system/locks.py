"""Exclusive locks for runs that write to the same location, released even if a process is killed."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import filelock
from pyspark.sql import SparkSession

from tasks.paths import local_path

logger = logging.getLogger("lakevision.locks")


@contextmanager
def exclusive_lock(url: str, spark: SparkSession | None = None) -> Iterator[None]:
    """Acquire the exclusive lock of a local folder for the duration of the block, waiting for other processes.

    Data read before may have changed once the lock is acquired. The lock file beside the folder is never removed: a
    file that another process waits for must not be replaced. An object store has no lock: its writers must tolerate
    concurrent ones.

    Args:
        url: Folder or URL, which need not exist.
        spark: Session whose JVM writes; the JVM outlives a killed driver for a moment, and so holds a lock, too.
    """
    path = local_path(url)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another run writes to %s: waiting until it ends", url)
        lock.acquire()
    try:
        with nullcontext() if spark is None else _held_by_jvm(spark, path):
            yield
    finally:
        lock.release()


@contextmanager
def _held_by_jvm(spark: SparkSession, path: Path) -> Iterator[None]:
    """Let the JVM hold a file lock until the block or the JVM ends, waiting for a JVM that lost its driver."""
    jvm: Any = spark._jvm
    channel = jvm.java.io.RandomAccessFile(f"{path}.jvm.lock", "rw").getChannel()
    try:
        if channel.tryLock() is None:
            logger.info("the JVM of a run that was killed still writes to %s: waiting until it ends", path)
            while channel.tryLock() is None:
                time.sleep(0.1)
        yield
    finally:
        channel.close()
