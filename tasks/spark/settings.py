"""Settings of a new Spark session with Delta, on this machine or on a cluster, and what a caller's session needs."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig
from tasks.config.values import memory_bytes
from tasks.environment import java_environment
from tasks.errors import WrongInput
from tasks.spark.cluster import cluster_settings, is_in_driver
from tasks.spark.gateway import add_to_class_path, place_of_class
from tasks.spark.jvm import delta_jars, jars_folder, java_options
from tasks.storage import Storage
from tasks.system.cores import num_cores

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_SETTINGS = {
    "spark.sql.extensions": DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

SERIAL_CORES, SERIAL_HEAP_BYTES = 4, 4 << 30
"""Cores and heap up to which one thread collects the JVM's garbage.

On 2 cores with the default heap, as fast as G1, with 200 to 800 MB less resident memory and less growth of it with the
number of images (LOG.md). More cores and larger heaps have more to collect than one thread should.
"""


def collects_serially(config: SparkConfig) -> bool:
    """Return whether one thread collects the garbage of a local session's JVM, see SERIAL_CORES."""
    is_small = num_cores() <= SERIAL_CORES and memory_bytes(config.driver_memory) <= SERIAL_HEAP_BYTES
    # A JVM that is given two collectors does not start.
    return is_small and not re.search(r"-XX:\+Use\w*GC\b", java_environment())


def session_settings(
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
    settings = DELTA_SETTINGS | {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": f"{storage.home}/spark-warehouse",
        "spark.driver.memory": config.driver_memory,
        "spark.ui.showConsoleProgress": "false",
        # Names of written files are collected from every task: bounded by the heap instead of 1 GB.
        "spark.driver.maxResultSize": "0",
        # The defaults are for rows of numbers; with images, batches of 10,000 or vectors of 4,096 rows are gigabytes.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "128",
        # 128 large photos, or Spark's default of 64 MB, are too much for each of many workers.
        "spark.sql.execution.arrow.maxBytesPerBatch": "32m",
        "spark.sql.parquet.columnarReaderBatchSize": "128",
        "spark.hadoop.parquet.page.size.row.check.min": "4",
        "spark.hadoop.parquet.page.size.row.check.max": "64",
        # A reader holds one row group: 128 MB of images are too much for each of many workers.
        "spark.hadoop.parquet.block.size": str(32 << 20),
        # A task reads two row groups of images: many tasks keep all cores busy, and no image is sent to another one.
        "spark.sql.files.maxPartitionBytes": str(32 << 20),
        # All new predictions belong to one partition: one task would write them all.
        "spark.databricks.delta.merge.repartitionBeforeWrite.enabled": "false",
        # Maintenance decides which versions stay and how long files do. By default, Delta reads no version older than
        # delta.deletedFileRetentionDuration, a week, and keeps files as long, whatever a VACUUM says.
        "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration": "false",
        "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled": "false",
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
            "spark.driver.extraJavaOptions": java_options(java, scratch, serial=collects_serially(config)),
            "spark.local.dir": str(scratch),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.python.daemon.module": "tasks.spark.python_daemon",
            # Other users of the machine reach the driver's port, which deserializes its input. The secret is generated
            # in the JVM and stays there; executors in other processes (local-cluster) would need it as well.
            "spark.authenticate": str(is_in_driver(master)).lower(),
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


def check_callers_session(session: SparkSession) -> None:
    """Check that a session which the caller has built can do the work of a stage.

    Raises:
        WrongInput: It has no Delta, or its Python workers cannot run this project's functions.
    """
    lacking = [
        f"setting {name}" for name in DELTA_SETTINGS if DELTA_SETTINGS[name] not in str(session.conf.get(name, ""))
    ]
    if lacking or place_of_class(DELTA_EXTENSION) is None:
        settings = " and ".join(f"{name}={value}" for name, value in DELTA_SETTINGS.items())
        raise WrongInput(
            f"the active Spark session lacks Delta's {lacking[0] if lacking else 'jars'}",
            way_out=f"build it by delta.configure_spark_with_delta_pip with {settings}, or call its stop(), and another"
            " is started",
        )
    python, own = session.sparkContext.pythonExec, Path(sys.executable)
    found, workers = Path(shutil.which(python) or ""), (session.sparkContext.applicationId, python)
    if workers in _checked or (found.parent, found.resolve()) == (own.parent, own.resolve()):
        return
    try:
        session.range(0, 1, 1, 1).mapInArrow(_unchanged, "id long").collect()
    except Exception as error:  # Of Python, of the JVM, or of the system that does not find the program.
        raise WrongInput(
            f"the Python workers of the active Spark session run '{python}', which cannot run a stage "
            f"({_reason(error)})",
            way_out=f"set PYSPARK_PYTHON to {sys.executable} before it is built, or call its stop(), and another is "
            "started",
        ) from None
    _checked.add(workers)


_checked: set[tuple[str, str]] = set()
"""Applications of Spark whose Python workers have run a job, and their program."""


def _reason(error: Exception) -> str:
    """Return the last error in a text that may have tracebacks of Python and of the JVM."""
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"Error: |error[=:]", line)]
    return lines[-1] if lines else type(error).__name__


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
