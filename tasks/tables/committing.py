"""The commit to a Delta table: once begun, it is waited for, whatever interrupts its run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from delta.exceptions import DeltaConcurrentModificationException
from deltalake.exceptions import CommitFailedError
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import SparkContext

from tasks.paths import local_path
from tasks.spark.gateway import jvm_is_alive
from tasks.system.locks import check_leases
from tasks.system.signals import run_uninterrupted

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
    """Call `work`, and note that the commit has ended if this is known."""
    try:
        with translate_conflict(path):
            done = work()
    except TableChanged:
        _unsure.discard(path)
        raise
    except Exception as error:
        # A store may carry out a request whose answer was lost, and so may a JVM whose connection was lost.
        if local_path(path) is not None and not (isinstance(error, Py4JNetworkError) and jvm_is_alive()):
            _unsure.discard(path)
        if LEASE_ENDED in str(error):
            check_leases()
        raise
    _unsure.discard(path)
    return done


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


@contextmanager
def translate_conflict(path: str) -> Iterator[None]:
    """Translate the exceptions of Delta and delta-rs for concurrent commits into TableChanged."""
    try:
        yield
    except (DeltaConcurrentModificationException, CommitFailedError) as error:
        if any(text in str(error) for text in UNSUPPORTED):  # of the same class, though no commit was made meanwhile
            raise
        raise TableChanged(path) from error
    except Py4JJavaError as error:  # Raised by JVM methods that are not called through Delta's Python API.
        java = "io.delta.exceptions.DeltaConcurrentModificationException"
        if not is_instance_of(SparkContext._gateway, error.java_exception, java):
            raise
        raise TableChanged(path) from error
