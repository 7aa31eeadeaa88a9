"""The connection to Spark's JVM: which process started it, whether it runs, its failures as text, and its shutdown."""

import logging
import re
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from tasks.environment import SPARK_SECRET, runs_under_spark_submit
from tasks.errors import DiskFull, WrongInput

logger = logging.getLogger("lakevision.spark")

STOP_SECONDS = 120
"""Time after which a JVM that does not exit is killed; writing its class archive takes twenty seconds."""

EXIT_SECONDS = 10
"""Time in which a JVM exits that has closed its connections."""

ANSWER_SECONDS = 30
"""Time after which a JVM of spark-submit that does not accept a connection has exited."""


def submitted_settings() -> dict[str, str]:
    """Return Spark's settings as spark-submit was given them; empty if this process does not run under it.

    spark-submit starts the JVM, with its master and class path, before this process.
    """
    if not runs_under_spark_submit():
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf(loadDefaults=True, _jvm=SparkContext._jvm).getAll())


def start_authenticated_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM, if none runs, and give it the secret of a standalone cluster from its environment.

    Spark's driver requires the secret as a setting. Settings known before the JVM starts are on its command line, which
    other users of the machine can read.

    Args:
        settings: Spark's settings of the session, without the secret.
    """
    SparkContext._ensure_initialized(conf=SparkConf().setAll(list(settings.items())))
    system = connected_jvm().System
    system.setProperty("spark.authenticate.secret", system.getenv(SPARK_SECRET))


def connected_jvm() -> Any:
    """Return the JVM that this process is connected to."""
    return SparkContext._jvm


def class_loader() -> Any:
    """Return the class loader of Spark in the connected JVM, to which jars can be added at run time."""
    return connected_jvm().Thread.currentThread().getContextClassLoader()


def place_of_class(name: str) -> str | None:
    """Return the URL from which the connected JVM loads a class, with the path of its jar; None without the class."""
    found = class_loader().getResource(f"{name.replace('.', '/')}.class")
    return None if found is None else str(found.toString())


def add_to_class_path(jars: Iterable[str]) -> None:
    """Add jars to the class path of the driver's JVM, which runs without them."""
    for jar in jars:
        class_loader().addURL(connected_jvm().java.io.File(jar).toURI().toURL())


def jvm_is_alive() -> bool:
    """Return whether this process is connected to a JVM that runs."""
    gateway = SparkContext._gateway
    if gateway is None:
        return False
    if gateway.proc is not None:
        return gateway.proc.poll() is None
    parameters = gateway.gateway_parameters
    try:
        socket.create_connection((parameters.address, parameters.port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def has_lost_jvm() -> bool:
    """Return whether the JVM has exited, after a connection to it failed: it closes connections before it is gone."""
    gateway = SparkContext._gateway
    if gateway is not None and gateway.proc is not None:
        with suppress(subprocess.TimeoutExpired):
            gateway.proc.wait(timeout=EXIT_SECONDS)
    return not jvm_is_alive()


def describe_exit() -> str:
    """Return a sentence about the JVM that exited while this process was connected to it."""
    gateway = SparkContext._gateway
    if gateway is None or gateway.proc is None:
        return "the JVM of spark-submit exited unexpectedly"
    return f"the JVM of Spark exited unexpectedly (status {gateway.proc.poll()})"


MAX_CAUSES = 5
"""Maximum number of causes in the message of a session that does not start."""


class SparkFailed(RuntimeError):
    """Work that failed in Spark, with its message as text: Spark's own exceptions read it from the JVM when shown."""


WRONG_SETTINGS = (
    *("BindException", "UnknownHostException", "ClassNotFoundException", "ClassCastException"),
    *("IllegalArgumentException", "NumberFormatException", "NoSuchMethodException"),
)
"""Ends of the names of Java's exceptions that end each start with the same settings."""


def start_failure(error: BaseException, conf: Mapping[str, str], log: Path) -> BaseException:
    """Return the failure of a session's start as text, which its JVM has to be asked for while it runs.

    Args:
        error: The failure.
        conf: Spark's settings given by the user; the message names those that Java's messages name, else all.
        log: The log file of the JVM.

    Returns:
        WrongInput for an address, a class or a value that Spark cannot use, else SparkFailed. An error that is not
        Java's is returned as it is.
    """
    thrown: Any = _java_exception(error)
    if thrown is None:
        return error
    texts: list[str] = []
    while thrown is not None and len(texts) < MAX_CAUSES:
        texts.append(shorten_exception(thrown.toString()).splitlines()[0])
        thrown = thrown.getCause()
    problem = f"Spark does not start ({'; caused by '.join(texts)})"
    if not any(text.partition(":")[0].endswith(WRONG_SETTINGS) for text in texts):
        return SparkFailed(f"{problem}, see {log}: run again")
    # A short value, such as a number, may be in the message for another reason.
    named = [name for name, value in conf.items() if name in problem or (len(value) > 3 and value in problem)]
    given = ", ".join(f"{name} '{conf[name]}'" for name in named or conf)
    # One of several that the message does not name: the others may be right.
    way_out = f"{'correct' if named else 'check'} {given or 'the settings of the group spark'}"
    return WrongInput(problem, setting="spark.conf", way_out=way_out)


def _java_exception(error: BaseException) -> Any:
    """Return the exception that the JVM threw; None for another error. Spark's first session replaces Py4J's errors."""
    if isinstance(error, CapturedException):
        return error._origin
    return error.java_exception if isinstance(error, Py4JJavaError) else None


def _root_message(error: Py4JJavaError) -> str:
    thrown = error.java_exception
    while "awaitResult" in thrown.toString() and thrown.getCause() is not None:
        thrown = thrown.getCause()  # A thread that waited for another has no message of its own.
    return shorten_exception(thrown.toString())


def shorten_exception(text: str) -> str:
    """Return the useful part of a JVM exception's text, which may include the stack trace of a task."""
    first = text.split("\n\tat ", maxsplit=1)[0]
    # To the JVM, a worker that dies before it has sent its process id is a closed socket and nothing more. If a worker
    # dies right afterwards, the JVM finds no process of this id.
    if (
        "Python worker exited unexpectedly" in text
        or "Python daemon failed to launch worker." in text
        or ("EOFException" in text and "spark.api.python" in text)
    ):
        return (
            "a Python worker of Spark was killed, as the kernel does when memory runs out: run again, or with "
            f"fewer concurrent workers (spark.master local[1]); Spark's message: {first}"
        )
    return first


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
        gateway = SparkContext._gateway
        if gateway is not None and not jvm_is_alive():
            way_out = f"see {log}: run again" if gateway.proc is not None else "see its output: submit again"
            # The exception of a closed socket depends on the moment.
            raise SparkFailed(f"{describe_exit()}, {way_out}") from error
        if not isinstance(error, (Py4JJavaError, CapturedException)):
            raise
        if found := re.search(r"ModuleNotFoundError: No module named '(tasks|flows)\b", str(error)):
            raise SparkFailed(
                f"Python on a Spark executor has no module '{found[1]}': install lakevision there "
                "(deployments/README.md, 'On a Spark cluster')"
            ) from None
        raise SparkFailed(_root_message(error) if isinstance(error, Py4JJavaError) else str(error)) from None


def forget_dead_jvm() -> bool:
    """Reset pyspark's state of a JVM that exited, which pyspark would keep connecting to; return whether it did."""
    gateway = SparkContext._gateway
    if gateway is None or jvm_is_alive():
        return False
    logger.warning("%s: the next session starts another", describe_exit())
    gateway.close()
    _forget_gateway()
    return True


def stop_jvm() -> None:
    """Shut down the JVM of a stopped session: pyspark keeps it, with all its memory, until this process ends.

    A JVM of spark-submit is left running: it ends with this process, and a later session uses it again.
    """
    gateway = SparkContext._gateway
    if gateway is None or gateway.proc is None:
        return
    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _forget_gateway()


_of_parent: list[object] = []


def keep_parents_objects(*others: object) -> None:
    """Reset pyspark's state in a forked process, without an effect on the JVM of its parent.

    Args:
        others: Further objects to keep. When Python frees an object, py4j frees that of the JVM, which the parent uses.
    """
    context, session = SparkContext._active_spark_context, SparkSession._instantiatedSession
    _of_parent.extend(
        [SparkContext._gateway, SparkContext._jvm, context, session, SparkSession._activeSession, *others]
    )
    _forget_gateway()


def _forget_gateway() -> None:
    SparkContext._gateway = None
    SparkContext._jvm = None
    # After a kill during the start of a session, pyspark keeps a partial session that later ones would reuse.
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None
