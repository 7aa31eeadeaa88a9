"""Creation, reuse and shutdown of the Spark session."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig
from tasks.config.values import memory_bytes
from tasks.spark.failure import failures_as_text
from tasks.spark.jvm import check_java, delta_jars, java_options
from tasks.spark.scratch import Scratch, scratch_root
from tasks.spark.worker_log import forward_worker_lines, stderr_into
from tasks.storage import Storage
from tasks.system.cores import free_memory, num_cores

logger = logging.getLogger("lakevision.spark")

Result = TypeVar("Result")

BROADCAST_ROWS = 1_000_000
"""Tables of up to this many rows without images (about 100 bytes each) are broadcast: no image is shuffled."""

SPARE_HEAPS = 4
"""Free memory from which an idle JVM is kept during a training run, in multiples of its maximum heap."""

STOP_SECONDS = 120
"""Time after which a JVM that does not exit is killed; writing its class archive takes twenty seconds."""


def _settings(config: SparkConfig, storage: Storage, scratch: Path | None, java: str) -> dict[str, str]:
    cores = num_cores()
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": config.driver_memory,
        "spark.ui.showConsoleProgress": "false",
        # Names of written files are collected from every task: bounded by the heap instead of 1 GB.
        "spark.driver.maxResultSize": "0",
        # The defaults are for rows of numbers; with images, batches of 10,000 or vectors of 4,096 rows are gigabytes.
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "128",
        # 128 large photos, or Spark's default of 256 MB, are too much for each of many workers.
        "spark.sql.execution.arrow.maxBytesPerBatch": "32m",
        "spark.sql.parquet.columnarReaderBatchSize": "128",
        "spark.hadoop.parquet.page.size.row.check.min": "4",
        "spark.hadoop.parquet.page.size.row.check.max": "64",
        # A reader holds one row group: 128 MB of images are too much for each of many workers.
        "spark.hadoop.parquet.block.size": str(32 << 20),
        # JPEG files do not compress and are distinct.
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.hadoop.parquet.enable.dictionary": "false",
    }
    if scratch is not None:
        settings |= {
            # The defaults are for clusters: on one machine, empty tasks would take most of a minute.
            "spark.sql.shuffle.partitions": str(cores),
            "spark.databricks.delta.snapshotPartitions": "2",
            # The number of tasks in which VACUUM lists files; the default is 10,000.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(cores),
            "spark.driver.extraJavaOptions": java_options(java, scratch),
            "spark.local.dir": str(scratch),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": f"{storage.home}/spark-warehouse",
            # Other users of the machine reach the driver's port, which deserializes its input. The secret is generated
            # in the JVM and stays there; executors in other processes (local-cluster) would need it as well.
            "spark.authenticate": str(not config.master.startswith("local-cluster")).lower(),
        }
    # A user may set Delta's jars in spark.conf; nothing is downloaded without being configured.
    set_by_user = {"spark.jars", "spark.jars.packages"} & config.conf.keys()
    jars = delta_jars(required=not set_by_user)
    if jars:
        settings["spark.jars"] = ",".join(jars)
        if scratch is not None:
            # On the class path as well: a class data archive has no classes of Spark's own class loader.
            settings["spark.driver.extraClassPath"] = ":".join(jars)
    return settings | config.conf


@dataclass
class _SessionState:
    """Nesting depth of `keep_spark`, the session kept open for the next stage, and its temporary files."""

    scopes: int = 0
    session: SparkSession | None = None
    forwarding: bool = False
    scratch: Scratch | None = None


_state = _SessionState()


@contextmanager
def keep_spark() -> Iterator[None]:
    """Keep the first session opened inside open for all later ones inside, and stop it at the end."""
    _state.scopes += 1
    try:
        yield
    finally:
        _state.scopes -= 1
        if _state.scopes == 0:
            _stop_kept_session()


def release_memory_for_training(config: SparkConfig) -> None:
    """Stop the kept session before a long stage without Spark, unless it is local and there is memory for both.

    Another session costs the start of a JVM and the loading of its classes, about ten seconds; an idle JVM costs its
    heap. On a cluster an idle session would hold its executors for hours.
    """
    if _state.session is None:
        return
    is_roomy = free_memory() >= SPARE_HEAPS * memory_bytes(config.driver_memory)
    if is_roomy and config.master.startswith("local"):
        return
    logger.info("Spark is stopped until it is needed again")
    _stop_kept_session()


def _stop_kept_session() -> None:
    session, _state.session = _state.session, None
    if session is not None:
        _stop(session)


@contextmanager
def _forwarded(log: Path) -> Iterator[None]:
    """Forward the workers' messages, once for all nested sessions."""
    if _state.forwarding:
        yield
        return
    _state.forwarding = True
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    try:
        with forward_worker_lines(log):
            yield
    finally:
        _state.forwarding = False


@contextmanager
def spark_session(config: SparkConfig, storage: Storage) -> Iterator[SparkSession]:
    """Yield a Spark session with Delta: the active one, or a new session that is stopped at the end.

    A retry after the JVM was killed starts another JVM.

    Raises:
        WrongInput: No Java 17 or 21.
        SparkFailed: Work inside failed in the JVM or in a Python worker.
    """
    log = storage.logs / "spark.log"
    _forget_dead_jvm()
    active = SparkSession.getActiveSession()
    if active is not None:
        with _forwarded(log), failures_as_text(log):
            yield active
        return
    java = check_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if config.master.startswith("local"):  # On a cluster, executors have their own temporary folders.
        _state.scratch = Scratch(scratch_root(storage))
    builder = SparkSession.builder.master(config.master).appName("lakevision")
    scratch = None if _state.scratch is None else _state.scratch.folder
    for name, value in _settings(config, storage, scratch, java).items():
        builder = builder.config(name, value)
    try:
        with stderr_into(log):
            session = builder.getOrCreate()
    except BaseException:
        _stop_jvm()  # It may be running without a session; a retry starts another.
        raise
    session.sparkContext.setLogLevel("ERROR")
    try:
        with _forwarded(log), failures_as_text(log):
            yield session
    finally:
        if _state.scopes:
            _state.session = session
        else:
            _stop(session)


class NeedsSpark(Exception):
    """Signal to `try_without_spark` that the work needs a Spark session; it never reaches a user."""


def try_without_spark(work: Callable[[SparkSession | None], Result], config: SparkConfig, storage: Storage) -> Result:
    """Call `work` without a session, which takes seconds to start, and again with one if it raises NeedsSpark.

    A session that is already open is used at once: trying without it first would do half of the work twice.

    Args:
        work: Takes a session or None; raises NeedsSpark before it has changed anything if it needs a session.
        config: As `spark_session`.
        storage: As `spark_session`.

    Raises:
        WrongInput: As `spark_session`.
        SparkFailed: As `spark_session`.
    """
    _forget_dead_jvm()
    if SparkSession.getActiveSession() is None:
        try:
            return work(None)
        except NeedsSpark:
            pass  # The handler ends before the second try, or the data read by the first would stay in memory.
    with spark_session(config, storage) as session:
        return work(session)


def _stop(session: SparkSession) -> None:
    if _jvm_is_alive():
        session.stop()
        _stop_jvm()
    else:
        _forget_dead_jvm()


def _jvm_is_alive() -> bool:
    gateway = SparkContext._gateway
    return gateway is not None and gateway.proc.poll() is None


def _forget_dead_jvm() -> None:
    """Reset pyspark's state of a JVM that was killed, which pyspark would keep connecting to."""
    gateway = SparkContext._gateway
    if gateway is None or _jvm_is_alive():
        return
    status = gateway.proc.poll()
    logger.warning("the JVM of Spark exited unexpectedly (status %d): the next session starts another", status)
    gateway.close()
    _forget_gateway()


def _stop_jvm() -> None:
    """Shut down the JVM of the stopped session: pyspark keeps it, with all its memory, until this process ends."""
    gateway = SparkContext._gateway
    if gateway is None:
        _remove_scratch()
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
    _remove_scratch()


def _remove_scratch() -> None:
    if _state.scratch is not None:
        _state.scratch.remove()
        _state.scratch = None
