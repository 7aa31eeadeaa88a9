"""Writing to a table: the right to it, and the commit, which is waited for once begun, whatever interrupts its run.

The right is a file lock on a folder; on a store, what its server offers. Delta's commit fails if another driver
committed the same version, on each store but one: an S3 server that ignores `If-None-Match` would replace the commit.
There, a second driver is refused while the first one writes.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from uuid import uuid4

from delta.exceptions import DeltaConcurrentModificationException
from deltalake.exceptions import CommitFailedError
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tasks.errors import TableInUse
from tasks.object_store import file_system, has_conditional_puts
from tasks.paths import local_path
from tasks.spark.file_systems import conditional_log_store
from tasks.spark.gateway import jvm_is_alive
from tasks.system.locks import check_leases, exclusive_lock, leased, lock_lost
from tasks.system.signals import run_uninterrupted

logger = logging.getLogger("lakevision.tables")

RENEWAL_SECONDS = 10.0
"""Interval at which a driver renews its mark."""

ABANDONED_SECONDS = 60.0
"""Age of a mark by the server's clock after which its driver counts as killed."""

LEASE_SECONDS = ABANDONED_SECONDS / 2
"""Time after the last renewal up to which a driver begins a commit: the rest is for the commit, and for the clocks."""


@contextmanager
def write_access(path: str, spark: SparkSession | None = None) -> Iterator[None]:
    """Acquire the right to write to a table for the duration of the block.

    On a folder, other processes are waited for. On a store, other drivers write at the same time, and a commit that
    conflicts with another's raises TableChanged. Only where the server has no conditional puts, they are refused.

    Args:
        path: Path or URL of the table, which need not exist.
        spark: As `exclusive_lock`.

    Raises:
        TableInUse: Another driver writes to the table, and the server has no conditional puts.
    """
    with exclusive_lock(path, spark):
        if not path.startswith("s3a://") or has_conditional_puts(path.rsplit("/", 1)[0]):
            yield
        else:
            with _only_driver(path, spark):
                yield


@contextmanager
def _only_driver(path: str, spark: SparkSession | None) -> Iterator[None]:
    """Mark a table as written to by this driver for the duration of the block.

    A driver that could not renew its mark begins no commit. Nor does its JVM, which asks again at each attempt of a
    commit to put it into the log.

    Raises:
        TableInUse: Another driver has a mark, and renews it.
    """
    logger.warning(
        "the server of %s ignores If-None-Match (conditional puts): only one driver at a time may write to it, and "
        "others that do not use this package are not noticed", path,
    )  # fmt: skip
    filesystem, root = file_system(path)
    own = f"{root}.writers/{uuid4().hex}"
    # First the mark, then the look at those of others: of two drivers that begin together, one sees the other.
    filesystem.pipe_file(own, b"")
    try:
        _refuse_others(filesystem, own, path)
        with _renewed(filesystem, own, path, spark) as lease, leased(lease.check):
            yield
    finally:
        try:
            filesystem.rm_file(own)
        except Exception as error:  # Each store's package has its own; the error of the block is the one to raise.
            logger.warning("the mark %s was not removed, and counts for %.0f s: %s", own, ABANDONED_SECONDS, error)


def _refuse_others(filesystem: Any, own: str, path: str) -> None:
    """Return once all other marks are abandoned.

    Raises:
        TableInUse: Another driver renewed its mark.
    """
    first: dict[str, float] = {}
    while True:
        # One request, since a mark may be removed at any moment; times are those of the server's clock.
        listed = filesystem.ls(own.rsplit("/", 1)[0], detail=True)
        marks = {mark["name"]: mark["LastModified"].timestamp() for mark in listed}
        now = marks.pop(own, 0.0)
        fresh = {mark: at for mark, at in marks.items() if now - at < ABANDONED_SECONDS}
        if not fresh:
            return
        if any(first.setdefault(mark, at) != at for mark, at in fresh.items()):
            raise TableInUse(
                f"another driver writes to '{path}', whose server has no conditional puts, so that the two could "
                "replace each other's commits",
                way_out="run again when it has ended, or use a server that has them",
            )
        logger.info("%s has the mark of another driver: waiting to see if it is alive", path)
        time.sleep(RENEWAL_SECONDS / 2)
        filesystem.pipe_file(own, b"")


class _Lease:
    """The time up to which this driver may begin a commit to a table, for this process and its JVM."""

    def __init__(self, path: str, spark: SparkSession | None) -> None:
        self._path, self._began = path, 0.0
        self._log_store: Any = None if spark is None else conditional_log_store(spark, path)
        self.renew(time.monotonic())

    def renew(self, began: float) -> None:
        """Note that the mark was renewed by a request that began at this time of the monotonic clock."""
        self._began = began
        if self._log_store is not None:
            self._log_store.lease(self._path, int(1000 * (LEASE_SECONDS - (time.monotonic() - began))))

    def check(self) -> None:
        """Check that no other driver can count this one as killed.

        Raises:
            LockLost: The mark was not renewed for LEASE_SECONDS.
        """
        age = time.monotonic() - self._began
        if age > LEASE_SECONDS:
            raise lock_lost(self._path, f"for {age:.0f} s")

    def end(self) -> None:
        """Let the JVM commit without a lease again."""
        if self._log_store is not None:
            self._log_store.release(self._path)


@contextmanager
def _renewed(filesystem: Any, own: str, path: str, spark: SparkSession | None) -> Iterator[_Lease]:
    """Renew the mark in a thread for the duration of the block; yield the lease that it gives."""
    ended, lease = threading.Event(), _Lease(path, spark)

    def renew() -> None:
        while not ended.wait(RENEWAL_SECONDS):
            began = time.monotonic()
            try:
                filesystem.pipe_file(own, b"")
                lease.renew(began)
            except Exception as error:  # Each store's package has its own; the next renewal may succeed.
                logger.warning("the mark %s was not renewed: %s", own, error)

    thread = threading.Thread(target=renew, name="lakevision-writer", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        lease.end()


T = TypeVar("T")

UNSUPPORTED = ("Unsupported table features", "column-mapped tables")
"""Messages of delta-rs about a table with newer features of the protocol, which it refuses before it commits."""

LEASE_ENDED = "the lease of this driver has ended"
"""Part of the message with which ConditionalPutLogStore.java refuses a commit."""

_unsure: set[str] = set()
"""Tables to which this process began a commit that may not have ended."""


class TableChanged(RuntimeError):
    """Conflict: another program committed to a table between this run's read and its commit."""

    def __init__(self, path: str) -> None:
        super().__init__(f"another program wrote to '{path}' during this run: run again")


def commit(path: str, work: Callable[[], T]) -> T:
    """Call a function that commits to a table, and return its result.

    An interrupt or a time limit that comes meanwhile is raised after the end of the commit, which cancels its Spark
    jobs. Otherwise this process would leave the JVM alone with a commit, and remove files that the commit names.

    Args:
        path: Path or URL of the table.
        work: Makes one commit, by Spark or by delta-rs.

    Raises:
        LockLost: A lease of this run has not been renewed; nothing was committed.
        TableChanged: Another program committed meanwhile.
    """
    check_leases()
    _unsure.add(path)
    return run_uninterrupted(lambda: _ended(path, work), _cancel_jobs)


def _ended(path: str, work: Callable[[], T]) -> T:
    """Call `work`, and note that the commit has ended if this is known.

    Raises:
        TableChanged: In place of the exceptions of Delta and delta-rs for concurrent commits.
    """
    try:
        done = work()
    except Exception as error:
        if _is_conflict(error):
            _unsure.discard(path)
            raise TableChanged(path) from error
        # A store may carry out a request whose answer was lost, and so may a JVM whose connection was lost.
        if local_path(path) is not None and not (isinstance(error, Py4JNetworkError) and jvm_is_alive()):
            _unsure.discard(path)
        if LEASE_ENDED in str(error):
            check_leases()
        raise
    _unsure.discard(path)
    return done


def _is_conflict(error: Exception) -> bool:
    """Return whether an exception of Delta or delta-rs is that of a concurrent commit."""
    if isinstance(error, DeltaConcurrentModificationException | CommitFailedError):
        # Of the same class, though no commit was made meanwhile.
        return not any(text in str(error) for text in UNSUPPORTED)
    # Raised by JVM methods that are not called through Delta's Python API.
    java = "io.delta.exceptions.DeltaConcurrentModificationException"
    with suppress(Py4JError, OSError):  # The JVM may have ended: then the exception itself is raised.
        return isinstance(error, Py4JJavaError) and is_instance_of(SparkContext._gateway, error.java_exception, java)
    return False


def _cancel_jobs() -> None:
    context = SparkContext._active_spark_context
    with suppress(Py4JError):  # The JVM of a cancelled run gets the signal as well, and may end meanwhile.
        if context is not None and jvm_is_alive():
            context.cancelAllJobs()


def is_unsure(path: str) -> bool:
    """Return whether a commit of this process to a table may still be under way, so that no file may be removed.

    The next run finds in the table's log which files were committed.
    """
    return path in _unsure
