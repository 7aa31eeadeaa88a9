"""What a person reads of work that failed in Spark."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors.exceptions.captured import CapturedException

from tasks.errors import DiskFull, WrongInput


class SparkFailed(RuntimeError):
    """What Spark said of work that failed, as text: its own exception asks the JVM, which is gone when it is shown."""


def _said(error: Py4JJavaError) -> str:
    thrown = error.java_exception
    while "awaitResult" in thrown.toString() and thrown.getCause() is not None:
        thrown = thrown.getCause()  # A thread that waited for another has nothing to say itself.
    return in_short(thrown.toString())


def in_short(whole: str) -> str:
    """Return what a person can use of what the JVM says of an exception, which may hold a task's stack."""
    first = whole.split("\n\tat ", maxsplit=1)[0]
    # A worker that dies before it has said its number is a closed socket to the JVM, and nothing more.
    if "Python worker exited unexpectedly" in whole or ("EOFException" in whole and "spark.api.python" in whole):
        return (
            "a Python worker of Spark was killed, which the system does where memory is short: run again, or with "
            f"fewer workers at once (spark.master local[1]); Spark says: {first}"
        )
    return first


@contextmanager
def failure_in_text(log: Path) -> Iterator[None]:
    """Turn what Spark raises inside into SparkFailed while its JVM lives.

    Args:
        log: Where the JVM wrote what it has to say.
    """
    try:
        yield
    except (WrongInput, DiskFull):
        raise
    except Exception as error:
        gateway = SparkContext._gateway
        if gateway is not None and (status := gateway.proc.poll()) is not None:
            # What a closed socket makes of it depends on the moment.
            raise SparkFailed(f"the JVM of Spark ended by itself (status {status}), see {log}: run again") from error
        if isinstance(error, Py4JJavaError):
            raise SparkFailed(_said(error)) from None
        if isinstance(error, CapturedException):
            raise SparkFailed(str(error)) from None
        raise
