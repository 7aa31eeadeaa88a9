"""The connection to Spark's JVM: which process started it, whether it runs, and its shutdown."""

import logging
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tasks.environment import SPARK_SECRET, runs_under_spark_submit

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
    jvm: Any = SparkContext._jvm
    jvm.System.setProperty("spark.authenticate.secret", jvm.System.getenv(SPARK_SECRET))


def _class_loader() -> Any:
    jvm: Any = SparkContext._jvm
    return jvm.Thread.currentThread().getContextClassLoader()


def place_of_class(name: str) -> str | None:
    """Return the URL from which the connected JVM loads a class, with the path of its jar; None without the class."""
    found = _class_loader().getResource(f"{name.replace('.', '/')}.class")
    return None if found is None else str(found.toString())


def add_to_class_path(jars: Iterable[str]) -> None:
    """Add jars to the class path of the driver's JVM, which spark-submit started without them."""
    jvm: Any = SparkContext._jvm
    for jar in jars:
        _class_loader().addURL(jvm.java.io.File(jar).toURI().toURL())


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
    if gateway is None or gateway.proc is None:
        return not jvm_is_alive()
    try:
        gateway.proc.wait(timeout=EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def describe_exit() -> str:
    """Return a sentence about the JVM that exited while this process was connected to it."""
    gateway = SparkContext._gateway
    if gateway is None or gateway.proc is None:
        return "the JVM of spark-submit exited unexpectedly"
    return f"the JVM of Spark exited unexpectedly (status {gateway.proc.poll()})"


def failed_with_jvm(log: Path) -> str | None:
    """Return the error message of a JVM that exited while this process was connected to it, or None if it runs.

    Args:
        log: The log file of a JVM that this process started.
    """
    if SparkContext._gateway is None or jvm_is_alive():
        return None
    way_out = f"see {log}: run again" if SparkContext._gateway.proc is not None else "see its output: submit again"
    return f"{describe_exit()}, {way_out}"


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


def _forget_gateway() -> None:
    SparkContext._gateway = None
    SparkContext._jvm = None
    # After a kill during the start of a session, pyspark keeps a partial session that later ones would reuse.
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None
