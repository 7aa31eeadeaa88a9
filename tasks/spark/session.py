"""Creation, reuse and shutdown of the Spark session."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig
from tasks.config.values import memory_bytes
from tasks.spark.cluster import (
    cluster_settings,
    is_authenticated_by_secret,
    is_local,
    python_of_workers,
    session_master,
)
from tasks.spark.failure import failures_as_text
from tasks.spark.gateway import (
    add_to_class_path,
    forget_dead_jvm,
    jvm_is_alive,
    place_of_class,
    start_authenticated_jvm,
    stop_jvm,
    submitted_settings,
)
from tasks.spark.jvm import check_java, delta_jars, jars_folder, java_options
from tasks.spark.scratch import Scratch, scratch_root
from tasks.spark.worker_log import forward_worker_lines, stderr_into
from tasks.storage import Storage
from tasks.system.cores import free_memory, num_cores

logger = logging.getLogger("lakevision.spark")

Result = TypeVar("Result")

BROADCAST_ROWS = 1_000_000
"""Tables of up to this many rows without images (about 100 bytes each) are broadcast: no image is shuffled."""

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"

SPARE_HEAPS = 4
"""Free memory from which an idle JVM is kept during a training run, in multiples of its maximum heap."""


def _settings(
    config: SparkConfig, storage: Storage, master: str, scratch: Path | None, java: str, submitted: dict[str, str]
) -> dict[str, str]:
    """Return the settings of a new session; those of the user and of spark-submit take precedence.

    Args:
        config: As `spark_session`.
        storage: As `spark_session`.
        master: As `session_master`.
        scratch: Folder for the temporary files of a local session; None on a cluster.
        java: Output of `java -version`.
        submitted: As `submitted_settings`.

    Raises:
        WrongInput: Delta's jars are missing, or as `cluster_settings`.
        ClusterUnavailable: As `cluster_settings`.
    """
    cores = num_cores()
    settings = {
        "spark.sql.extensions": DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": f"{storage.home}/spark-warehouse",
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
    if scratch is None:
        settings |= cluster_settings(master, submitted | config.conf)
    else:
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
            # Other users of the machine reach the driver's port, which deserializes its input. The secret is generated
            # in the JVM and stays there; executors in other processes (local-cluster) would need it as well.
            "spark.authenticate": str(not master.startswith("local-cluster")).lower(),
        }
    # A user may set Delta's jars in spark.conf; nothing is downloaded without being configured.
    set_by_user = {"spark.jars", "spark.jars.packages"} & config.conf.keys()
    provided = place_of_class(DELTA_EXTENSION) if submitted else None
    # An earlier session of this process may have added lakevision's own jars: executors of this one need them again.
    is_provided = provided is not None and str(jars_folder()) not in provided
    jars = [] if is_provided else delta_jars(required=not set_by_user)
    if jars:
        settings["spark.jars"] = ",".join(jars)
        if scratch is not None:
            # On the class path as well: a class data archive has no classes of Spark's own class loader.
            settings["spark.driver.extraClassPath"] = ":".join(jars)
    merged = settings | submitted
    if submitted and jars:
        add_to_class_path(jars)
        merged["spark.jars"] = ",".join(filter(None, [submitted.get("spark.jars"), *jars]))
    return merged | config.conf


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
    if is_roomy and is_local(str(_state.session.sparkContext.master)):
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
        WrongInput: No Java 17 or 21, or as `cluster_settings`.
        ClusterUnavailable: As `cluster_settings`.
        SparkFailed: Work inside failed in the JVM or in a Python worker.
    """
    log = storage.logs / "spark.log"
    _forget_dead_jvm()
    active = SparkSession.getActiveSession()
    if active is not None:
        with _forwarded(log), failures_as_text(log), _jobs_ended(active):
            yield active
        return
    session = _start(config, storage, log)
    session.sparkContext.setLogLevel("ERROR")
    try:
        with _forwarded(log), failures_as_text(log), _jobs_ended(session):
            yield session
    finally:
        if _state.scopes:
            _state.session = session
        else:
            _stop(session)


@contextmanager
def _jobs_ended(session: SparkSession) -> Iterator[None]:
    """Cancel the session's jobs if the block fails: a time limit ends the block's thread, but not what the JVM does.

    A kept session would otherwise continue a job beside its retry, and commit it after the lock was released.
    """
    try:
        yield
    except BaseException:
        if jvm_is_alive():
            # The connection of this thread may be left in the middle of an answer; another thread has its own.
            canceller = threading.Thread(target=session.sparkContext.cancelAllJobs)
            canceller.start()
            canceller.join()
        raise


def _start(config: SparkConfig, storage: Storage, log: Path) -> SparkSession:
    submitted = submitted_settings()
    master = session_master(config, submitted)
    java = "" if submitted else check_java()
    os.environ["PYSPARK_PYTHON"] = python_of_workers(config, master)
    if is_local(master):  # On a cluster, executors have their own temporary folders.
        _state.scratch = Scratch(scratch_root(storage))
    scratch = None if _state.scratch is None else _state.scratch.folder
    try:
        settings = _settings(config, storage, master, scratch, java, submitted)
        builder = SparkSession.builder.master(master).appName("lakevision")
        for name, value in settings.items():
            builder = builder.config(name, value)
        with stderr_into(log):
            if is_authenticated_by_secret(master):
                start_authenticated_jvm(settings)
            return builder.getOrCreate()
    except BaseException:
        _stop_jvm()  # It may be running without a session; a retry starts another.
        raise


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
        ClusterUnavailable: As `spark_session`.
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
    if jvm_is_alive():
        session.stop()
        _stop_jvm()
    else:
        _forget_dead_jvm()


def _forget_dead_jvm() -> None:
    if forget_dead_jvm():
        _remove_scratch()


def _stop_jvm() -> None:
    stop_jvm()
    _remove_scratch()


def _remove_scratch() -> None:
    if _state.scratch is not None:
        _state.scratch.remove()
        _state.scratch = None
