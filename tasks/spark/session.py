"""The one place where a Spark session is made."""

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
from tasks.spark.failure import failure_in_text
from tasks.spark.jvm import check_java, delta_jars, java_options
from tasks.spark.scratch import Scratch, scratch_root
from tasks.spark.worker_log import forward_worker_lines, stderr_into
from tasks.storage import Storage
from tasks.system.cores import free_memory, num_cores

logger = logging.getLogger("lakevision.spark")

Result = TypeVar("Result")

BROADCAST_ROWS = 1_000_000
"""Up to so many rows of names and numbers (about 100 bytes each) go to every task, so that no image is shuffled."""

SPARE_HEAPS = 4
"""An idle JVM stays beside a training where so many of its heaps are free: it has one of them, at most."""

STOP_SECONDS = 120
"""In which a JVM ends, or is killed; one that writes its class archive takes twenty."""


def _settings(config: SparkConfig, storage: Storage, scratch: Path | None, java: str) -> dict[str, str]:
    cores = num_cores()
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": config.driver_memory,
        "spark.ui.showConsoleProgress": "false",
        # What workers say of the files they read is collected, some 230 bytes a file: the heap bounds it, not 1 GB.
        "spark.driver.maxResultSize": "0",
        # Row counts suit numbers; with images, 10,000 rows a batch or 4,096 a vector are gigabytes.
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "128",
        # Large photos: 128 of them, or Spark's own bound of 256 MB, are too much for each of many workers.
        "spark.sql.execution.arrow.maxBytesPerBatch": "32m",
        "spark.sql.parquet.columnarReaderBatchSize": "128",
        "spark.hadoop.parquet.page.size.row.check.min": "4",
        "spark.hadoop.parquet.page.size.row.check.max": "64",
        # A reader holds one row group: 128 MB of images in each of many workers is too much.
        "spark.hadoop.parquet.block.size": str(32 << 20),
        # JPEG bytes do not compress and no two are equal.
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.hadoop.parquet.enable.dictionary": "false",
    }
    if scratch is not None:
        settings |= {
            # The defaults are for clusters: on one machine most of a minute goes into empty tasks.
            "spark.sql.shuffle.partitions": str(cores),
            "spark.databricks.delta.snapshotPartitions": "2",
            # VACUUM lists its files in so many tasks; the default is 10,000.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(cores),
            "spark.driver.extraJavaOptions": java_options(java, scratch),
            "spark.local.dir": str(scratch),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": f"{storage.home}/spark-warehouse",
            # Other users of the machine reach the driver's port too, and it deserializes what it is sent. The secret is
            # generated in the JVM and stays there; executors of their own (local-cluster) would have to be given one.
            "spark.authenticate": str(not config.master.startswith("local-cluster")).lower(),
        }
    # A user may give Delta's jars in another way; nothing is fetched that nobody asked for.
    given_otherwise = {"spark.jars", "spark.jars.packages"} & config.conf.keys()
    jars = delta_jars(required=not given_otherwise)
    if jars:
        settings["spark.jars"] = ",".join(jars)
        if scratch is not None:
            # Also where the JVM looks first: an archive holds no class of Spark's own loader.
            settings["spark.driver.extraClassPath"] = ":".join(jars)
    return settings | config.conf


@dataclass
class _Kept:
    """Whether sessions stay open for the next stage, whether one of ours does, and where its temporary files lie."""

    scopes: int = 0
    session: SparkSession | None = None
    forwarding: bool = False
    scratch: Scratch | None = None


_kept = _Kept()


@contextmanager
def keep_spark() -> Iterator[None]:
    """Let the session that is first opened inside serve all others inside, and stop it at the end."""
    _kept.scopes += 1
    try:
        yield
    finally:
        _kept.scopes -= 1
        if _kept.scopes == 0:
            _stop_kept()


def leave_memory_to_training(config: SparkConfig) -> None:
    """Stop the kept session before a long stage without Spark, unless it is local and memory is to spare for both.

    Another session costs a JVM's start and the first use of each of its classes, some ten seconds; an idle JVM costs
    its heap. On a cluster an idle session would hold its executors for hours.
    """
    if _kept.session is None:
        return
    is_roomy = free_memory() >= SPARE_HEAPS * memory_bytes(config.driver_memory)
    if is_roomy and config.master.startswith("local"):
        return
    logger.info("Spark ends until it is needed again")
    _stop_kept()


def _stop_kept() -> None:
    session, _kept.session = _kept.session, None
    if session is not None:
        _stop(session)


@contextmanager
def _forwarded(log: Path) -> Iterator[None]:
    """Forward what workers say, once however many sessions are nested."""
    if _kept.forwarding:
        yield
        return
    _kept.forwarding = True
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    try:
        with forward_worker_lines(log):
            yield
    finally:
        _kept.forwarding = False


@contextmanager
def spark_session(config: SparkConfig, storage: Storage) -> Iterator[SparkSession]:
    """Yield a Spark session with Delta; reuse the one that is active, and stop only what was started here.

    A retry after the JVM was killed starts another one.

    Raises:
        WrongInput: No Java 17 or 21.
        SparkFailed: Work inside failed in the JVM or in a Python worker.
    """
    log = storage.logs / "spark.log"
    _forget_dead_jvm()
    active = SparkSession.getActiveSession()
    if active is not None:
        with _forwarded(log), failure_in_text(log):
            yield active
        return
    java = check_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if config.master.startswith("local"):  # on a cluster, executors have places of their own
        _kept.scratch = Scratch(scratch_root(storage))
    builder = SparkSession.builder.master(config.master).appName("lakevision")
    scratch = None if _kept.scratch is None else _kept.scratch.folder
    for name, value in _settings(config, storage, scratch, java).items():
        builder = builder.config(name, value)
    try:
        with stderr_into(log):
            session = builder.getOrCreate()
    except BaseException:
        _stop_jvm()  # It may run, without a session; a retry starts another.
        raise
    session.sparkContext.setLogLevel("ERROR")
    try:
        with _forwarded(log), failure_in_text(log):
            yield session
    finally:
        if _kept.scopes:
            _kept.session = session
        else:
            _stop(session)


class NeedsSpark(Exception):
    """What was to be done without Spark cannot be: for `without_spark_first`, never for a person."""


def without_spark_first(work: Callable[[SparkSession | None], Result], config: SparkConfig, storage: Storage) -> Result:
    """Do work without a session where it can be, since one takes seconds to start, and with one where it cannot.

    A session that is open already is used at once: trying without it first would do half of the work twice.

    Args:
        work: Raises NeedsSpark before it has changed anything, where it is given no session and needs one.
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
            pass  # Left before the second try: what the first one read would stay in memory beside it.
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
    """Drop what pyspark keeps of a JVM that was killed: it would talk to it for ever."""
    gateway = SparkContext._gateway
    if gateway is None or _jvm_is_alive():
        return
    logger.warning("the JVM of Spark ended by itself (status %d): the next session starts another", gateway.proc.poll())
    gateway.close()
    _forget_gateway()


def _stop_jvm() -> None:
    """End the JVM behind the stopped session: pyspark keeps it until this process ends, with all its memory."""
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
    # Killed while a session began, pyspark keeps half of it, which every later one would take for its own.
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None
    _remove_scratch()


def _remove_scratch() -> None:
    if _kept.scratch is not None:
        _kept.scratch.remove()
        _kept.scratch = None
