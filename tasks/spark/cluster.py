"""Sessions on a Spark cluster: its master, the driver's address, authentication, the executors' cores and folders."""

import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig
from tasks.environment import has_spark_secret, spark_variable
from tasks.errors import ClusterUnavailable, WrongInput
from tasks.object_store import PROBE
from tasks.paths import local_path
from tasks.system.cores import num_cores
from tasks.system.disk import existing_folder

logger = logging.getLogger("lakevision.spark")

MASTER_PORT = 7077
"""Port of a standalone master whose URL has none."""

CONNECT_SECONDS = 10
"""Timeout of the connection to a standalone master, in seconds."""

SETTLE_SECONDS = 2.0
"""Executors that do not register within this time after the previous one are not waited for."""


WARNING_SECONDS = 30.0
"""Interval of the warnings about a cluster that starts no executor, in seconds."""


def is_local(master: str) -> bool:
    """Return whether the executors of a Spark master are in the driver's JVM, or beside it on this machine."""
    return master.startswith("local")


def is_in_driver(master: str) -> bool:
    """Return whether the executor of a Spark master is the driver's JVM itself."""
    return is_local(master) and not master.startswith("local-cluster")


def session_master(config: SparkConfig, submitted: Mapping[str, str]) -> str:
    """Return the Spark master of a new session: that of spark-submit if it started this process, else the setting.

    Args:
        config: Settings of the session.
        submitted: As `submitted_settings`.

    Raises:
        WrongInput: The setting and spark-submit name different masters.
    """
    given = submitted.get("spark.master", config.master)
    if config.master not in {given, SparkConfig().master}:
        raise WrongInput(
            f"spark.master is '{config.master}', but spark-submit started this process with the master '{given}'",
            setting="spark.master",
            way_out="leave spark.master out, or give it to spark-submit as --master",
        )
    return given


def python_of_workers(config: SparkConfig, master: str) -> str:
    """Return the Python that executors start: this interpreter, unless another one is set for a cluster."""
    chosen = config.conf.get("spark.pyspark.python")
    if chosen or is_local(master):
        return str(chosen or sys.executable)
    return spark_variable("PYSPARK_PYTHON") or sys.executable


def cluster_settings(master: str, conf: Mapping[str, object]) -> dict[str, str]:
    """Return the settings of a session on a cluster; those of the user take precedence.

    Args:
        master: The Spark master.
        conf: Spark's settings given by the user.

    Raises:
        WrongInput: The master's host is unknown.
        ClusterUnavailable: No master answers.
    """
    # The driver's UI has no login, shows all settings, and can end jobs.
    settings = {"spark.ui.enabled": "false"}
    if not master.startswith("spark://"):
        return settings
    reached_from = _address_towards(master)
    if spark_variable("SPARK_LOCAL_IP") is None and "spark.driver.host" not in conf:
        # Spark would choose an address by the host's name, which executors often cannot reach.
        settings |= {"spark.driver.host": reached_from, "spark.driver.bindAddress": reached_from}
    if is_authenticated_by_secret(master):
        settings |= {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    elif str(conf.get("spark.authenticate")).lower() != "true":
        logger.warning(
            "'%s' is used without authentication: any client that reaches a port of the driver or an executor can "
            "run code as this user (deployments/README.md, 'On a Spark cluster')",
            master,
        )
    return settings


def is_authenticated_by_secret(master: str) -> bool:
    """Return whether the master is a standalone one, and the environment has the secret of its cluster."""
    return master.startswith("spark://") and has_spark_secret()


def _address_towards(master: str) -> str:
    """Return the address of this machine from which a standalone master is reached."""
    problems, unknown = [], []
    for place in master.removeprefix("spark://").split(","):
        found = re.fullmatch(r"\[?(.*?)\]?(?::(\d+))?", place)
        assert found is not None
        host, port = found[1], int(found[2] or MASTER_PORT)
        try:
            with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
            # Another code, such as EAI_AGAIN, means that the name server does not answer.
            if isinstance(error, socket.gaierror) and error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
                unknown.append(host)
    if len(unknown) == len(problems):
        problem = f"spark.master is '{master}', whose host '{', '.join(unknown)}' is unknown"
        raise WrongInput(problem, setting="spark.master", way_out="check its name")
    raise ClusterUnavailable(
        f"the Spark master '{master}' does not answer ({'; '.join(problems)})",
        setting="spark.master",
        way_out="start it, or correct spark.master",
    )


def num_task_slots(spark: SparkSession, check: Callable[[], None] = lambda: None) -> int:
    """Return the number of tasks that run at once; on a cluster, once the executors that are starting have registered.

    A session on a cluster is there before its executors: the first jobs would be split for the two cores that Spark
    assumes then.

    Args:
        spark: The session.
        check: Called while executors are missing; an exception in it ends the wait.
    """
    context = spark.sparkContext
    if not is_local(str(context.master)):
        _wait_for_executors(spark, check)
    conf = context.getConf()
    slots = context.defaultParallelism // int(conf.get("spark.task.cpus", "1") or 1)
    if share := float(conf.get("spark.task.resource.gpu.amount", "0") or 0):
        # Each executor runs as many tasks as its GPUs allow, even if it has more cores.
        executors = max(1, context._jsc.sc().getExecutorMemoryStatus().size() - 1)  # one entry is the driver's
        slots = min(slots, executors * int(float(conf.get("spark.executor.resource.gpu.amount", "1") or 1) / share))
    return max(1, slots)


def _wait_for_executors(spark: SparkSession, check: Callable[[], None]) -> None:
    context: Any = spark.sparkContext._jsc
    registered: Any = context.sc().getExecutorMemoryStatus  # one entry is the driver's
    if registered().size() > 1:
        return
    jvm: Any = spark.sparkContext._jvm
    # Clusters that start executors on demand need a job; Spark's own warning about it is in no log of the run.
    job = context.parallelize(jvm.java.util.List.of(0), 1).countAsync()
    began, warnings = time.monotonic(), 0
    while not job.isDone():
        check()
        time.sleep(0.1)
        if time.monotonic() - began > WARNING_SECONDS * (warnings + 1):
            warnings += 1
            logger.warning(
                "'%s' has started no executor for %.0f s: its cores or its memory are in use, or executors fail to "
                "start, as its master's page and logs show. The run waits",
                spark.sparkContext.master, time.monotonic() - began,
            )  # fmt: skip
    found, since = registered().size(), time.monotonic()
    while time.monotonic() - since < SETTLE_SECONDS:
        time.sleep(0.1)
        if registered().size() > found:
            found, since = registered().size(), time.monotonic()


def threads_per_task(spark: SparkSession) -> int | None:
    """Return the number of compute threads of a task if the driver can know it, else None for the cores of the task.

    Only local tasks run on the driver's cores.
    """
    context = spark.sparkContext
    return max(1, num_cores() // context.defaultParallelism) if is_local(str(context.master)) else None


TASKS_PER_SLOT = 2
"""Tasks of the check per task slot, so that every executor gets one."""


def check_visible(spark: SparkSession, folder: str, setting: str) -> None:
    """Check that all executors see what the driver writes to a folder, by writing a temporary file there.

    Executors would otherwise write to folders of the same name on their own machines, which the driver does not see.
    Nothing is checked for a URL, or for a local session. A folder that does not exist yet is checked at its nearest
    existing parent.

    Raises:
        WrongInput: An executor does not see the folder.
    """
    place = existing_folder(folder)
    if place is not None and not is_local(str(spark.sparkContext.master)):
        with tempfile.NamedTemporaryFile(prefix=PROBE, dir=place) as mark:
            _check_on_executors(spark, mark.name, folder, setting)


def check_file_visible(spark: SparkSession, folder: str, file: str, setting: str) -> None:
    """Check that all executors see a file of a folder that the driver only reads; as `check_visible`.

    Args:
        spark: The session.
        folder: Folder or URL.
        file: Path of an existing file, relative to the folder.
        setting: Name of the setting of the folder.

    Raises:
        WrongInput: An executor does not see the file.
    """
    place = local_path(folder)
    if place is not None and not is_local(str(spark.sparkContext.master)):
        _check_on_executors(spark, str((place / file).absolute()), folder, setting)


def _check_on_executors(spark: SparkSession, file: str, folder: str, setting: str) -> None:
    def host_without_file(_number: int) -> str | None:
        return None if os.path.exists(file) else socket.gethostname()

    tasks = TASKS_PER_SLOT * num_task_slots(spark)
    hosts = set(spark.sparkContext.parallelize(range(tasks), tasks).map(host_without_file).collect()) - {None}
    if hosts and os.path.exists(file):  # deleted in between, it would be missing everywhere
        raise WrongInput(
            f"{setting} is '{folder}', which Spark's executors on {', '.join(sorted(map(str, hosts)))} do not see",
            setting=setting,
            way_out="give a folder with the same path on the driver and on every executor, or a URL",
        )
