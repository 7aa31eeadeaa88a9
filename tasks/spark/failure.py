"""Conversion of Spark's failures to readable messages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors.exceptions.captured import CapturedException

from tasks.errors import DiskFull, WrongInput
from tasks.spark.gateway import failed_with_jvm


class SparkFailed(RuntimeError):
    """Work that failed in Spark, with its message as text: Spark's own exceptions read it from the JVM when shown."""


def _root_message(error: Py4JJavaError) -> str:
    thrown = error.java_exception
    while "awaitResult" in thrown.toString() and thrown.getCause() is not None:
        thrown = thrown.getCause()  # A thread that waited for another has no message of its own.
    return shorten_exception(thrown.toString())


def shorten_exception(text: str) -> str:
    """Return the useful part of a JVM exception's text, which may include the stack trace of a task."""
    first = text.split("\n\tat ", maxsplit=1)[0]
    # To the JVM, a worker that dies before it has sent its process id is a closed socket and nothing more.
    if "Python worker exited unexpectedly" in text or ("EOFException" in text and "spark.api.python" in text):
        return (
            "a Python worker of Spark was killed, as the kernel does when memory runs out: run again, or with "
            f"fewer concurrent workers (spark.master local[1]); Spark's message: {first}"
        )
    return first


def _missing_project(text: str) -> str | None:
    """Return the message for executors whose Python cannot import this project, or None for another exception."""
    found = re.search(r"ModuleNotFoundError: No module named '(tasks|flows)\b", text)
    if found is None:
        return None
    return (
        f"Python on a Spark executor has no module '{found[1]}': install lakevision there "
        "(deployments/README.md, 'On a Spark cluster')"
    )


@contextmanager
def failures_as_text(log: Path) -> Iterator[None]:
    """Convert exceptions of Spark raised inside to SparkFailed while the JVM is running.

    Args:
        log: The log file of the JVM.

    Raises:
        SparkFailed: Work failed in the JVM or in a Python worker, or the JVM exited.
    """
    try:
        yield
    except (WrongInput, DiskFull):
        raise
    except Exception as error:
        if message := failed_with_jvm(log):
            # The exception of a closed socket depends on the moment.
            raise SparkFailed(message) from error
        if isinstance(error, (Py4JJavaError, CapturedException)) and (message := _missing_project(str(error))):
            raise SparkFailed(message) from None
        if isinstance(error, Py4JJavaError):
            raise SparkFailed(_root_message(error)) from None
        if isinstance(error, CapturedException):
            raise SparkFailed(str(error)) from None
        raise
