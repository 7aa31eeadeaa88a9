"""Runs that write to the same place take turns, by a lock that ends with its process, however that ends."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import filelock
from pyspark.sql import SparkSession

from tasks.storage import local_path

logger = logging.getLogger("lakevision.turns")


@contextmanager
def take_turn(url: str, spark: SparkSession | None = None) -> Iterator[bool]:
    """Have a local place to ourselves; say whether another run had it, so that it is no longer as it was found.

    The lock file beside it stays: one that another process waits for must not be replaced by a new one of its name.
    An object store has no lock: what writes there must bear others.

    Args:
        url: Folder or URL, which need not be there.
        spark: The session whose JVM writes: it goes on for a moment when its driver is killed, and so holds a lock too.
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
        with nullcontext() if spark is None else _held_by_jvm(spark, path):
            yield waited
    finally:
        lock.release()


@contextmanager
def _held_by_jvm(spark: SparkSession, path: Path) -> Iterator[None]:
    """Let the JVM lock a file until it ends or we are done; one that lost its driver is waited for."""
    jvm: Any = spark._jvm
    channel = jvm.java.io.RandomAccessFile(f"{path}.jvm.lock", "rw").getChannel()
    while channel.tryLock() is None:
        time.sleep(0.1)
    try:
        yield
    finally:
        channel.close()
