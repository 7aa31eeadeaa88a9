"""Compact the Delta tables and remove the files that no kept version needs."""

import logging
import math
from datetime import UTC, datetime

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from tasks import tracking
from tasks.config import MaintainConfig, SparkConfig
from tasks.disk import check_writable, full_disk_named
from tasks.errors import WrongInput
from tasks.etl import delta, snapshots
from tasks.refs import MaintenanceReport, TableMaintenance
from tasks.spark import spark_session
from tasks.storage import Storage
from tasks.turns import take_turn

logger = logging.getLogger("lakevision.maintenance")

TABLES = ("images", "files", "predictions")
DELTA_FLOOR_HOURS = 168
"""Delta refuses a shorter retention by itself: a reader or writer may still need what a shorter one removes."""
RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
MAX_FILE_SIZE = "spark.databricks.delta.optimize.maxFileSize"


def retention_hours(wanted: int, oldest_needed: datetime | None, now: datetime) -> int:
    """Return how far back VACUUM must keep files so that the oldest needed version stays readable.

    A file of that version was removed after its commit, if at all, and VACUUM deletes only what was removed before
    `now` less the retention.

    Args:
        wanted: Retention in hours that a person asked for.
        oldest_needed: Commit time of the oldest version that a registered model was trained from, or None.
        now: Both times carry a time zone.
    """
    if oldest_needed is None:
        return wanted
    # One more hour, since commit times are those of a clock that may be set.
    return max(wanted, math.ceil((now - oldest_needed).total_seconds() / 3600) + 1)


def _commit_times(spark: SparkSession, path: str) -> dict[int, datetime]:
    rows = DeltaTable.forPath(spark, path).history().select("version", "timestamp").collect()
    return {row["version"]: row["timestamp"].astimezone(UTC) for row in rows}


def _needed(spark: SparkSession, path: str, versions: set[int]) -> datetime | None:
    """Return the commit time of the oldest needed version that the log still holds."""
    times = _commit_times(spark, path)
    gone = sorted(versions - times.keys())
    if gone:
        logger.warning("%s: the log no longer holds version %s, which a model was trained from", path, gone)
    return min((times[version] for version in versions & times.keys()), default=None)


def _check_floor(config: MaintainConfig, spark: SparkSession) -> None:
    if config.vacuum_hours < DELTA_FLOOR_HOURS and spark.conf.get(RETENTION_CHECK, "true") != "false":
        raise WrongInput(
            f"maintain.vacuum_hours is {config.vacuum_hours}, and Delta keeps {DELTA_FLOOR_HOURS} hours at least: "
            f"give that, or set {RETENTION_CHECK} to false in spark.conf when nothing reads or writes the tables"
        )


def maintain_table(spark: SparkSession, path: str, config: MaintainConfig, versions: set[int]) -> TableMaintenance:
    """Compact one table and vacuum it; at most one commit for the rows' files and two for the vacuum's own record."""
    spark.conf.set(MAX_FILE_SIZE, str(config.file_megabytes << 20))
    metrics = DeltaTable.forPath(spark, path).optimize().executeCompaction().collect()[0]["metrics"]
    hours = retention_hours(config.vacuum_hours, _needed(spark, path, versions), datetime.now(UTC))
    before = delta.count_data_files(path)
    DeltaTable.forPath(spark, path).vacuum(float(hours))
    after = delta.count_data_files(path)
    done = TableMaintenance(
        table=snapshots.latest(spark, path),
        files_compacted=metrics["numFilesRemoved"],
        files_written=metrics["numFilesAdded"],
        files_deleted=before - after,
        retention_hours=hours,
        kept_versions=sorted(versions),
    )
    logger.info(
        "%s: %d files compacted into %d, %d files deleted that nothing of the last %d hours needs",
        path, done.files_compacted, done.files_written, done.files_deleted, hours,
    )  # fmt: skip
    return done


def maintain_tables(config: MaintainConfig, storage: Storage, spark_config: SparkConfig) -> MaintenanceReport:
    """Compact and vacuum the tables that are there; no version that a registered model was trained from is lost.

    Raises:
        WrongInput: A retention that Delta refuses, something other than a Delta table at a table's place, or one that
            cannot be written to.
        DiskFull: No room was left.
    """
    paths = [storage.table(name) for name in TABLES]
    for path in (path for path in paths if delta.check_table_path(path)):
        check_writable(path, "storage.tables")
    with spark_session(spark_config, storage) as spark:
        _check_floor(config, spark)
        with (
            take_turn(storage.table("images"), spark),
            take_turn(storage.table("predictions"), spark),
            full_disk_named(storage.tables, storage.home),
        ):
            # Looked up now that nobody else is at the tables: a model may have been registered meanwhile.
            found = [path for path in paths if delta.check_table_path(path)]
            trained = tracking.trained_versions(storage)
            return _maintain_all(spark, config, found, trained)


def _maintain_all(
    spark: SparkSession, config: MaintainConfig, found: list[str], trained: dict[str, set[int]]
) -> MaintenanceReport:
    return MaintenanceReport(tables=[maintain_table(spark, path, config, trained.get(path, set())) for path in found])
