"""Runs that write to the same place take turns, by a lock that ends with its process, however that ends."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import filelock
from pyspark.sql import SparkSession

from tasks.paths import local_path

logger = logging.getLogger("lakevision.turns")


@contextmanager
def exclusive_lock(url: str, spark: SparkSession | None = None) -> Iterator[None]:
    """Have a local place to ourselves, after whoever has it now: what was seen of it before may have changed.

    The lock file beside it stays: one that another process waits for must not be replaced by a new one of its name.
    An object store has no lock: what writes there must bear others.

    Args:
        url: Folder or URL, which need not be there.
        spark: The session whose JVM writes: it goes on for a moment when its driver is killed, and so holds a lock too.
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
    """Let the JVM lock a file until it ends or we are done; one that lost its driver is waited for."""
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
