"""Compaction of the Delta tables, and removal of files that no kept version needs."""

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import uuid4

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from tasks.config.maintenance import MaintainConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.commits import KEEP_LOG
from tasks.maintenance.kept_versions import kept_versions
from tasks.maintenance.old_predictions import delete_old_predictions
from tasks.maintenance.retention import SAFE_AGE, DataFile, list_files, removable_files
from tasks.refs import MaintenanceReport, TableMaintenance
from tasks.spark.session import spark_session
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.tables import delta, snapshots
from tasks.tables.delta_internals import data_folder
from tasks.tables.writer import commit, write_access

logger = logging.getLogger("lakevision.maintenance")

TABLES = ("images", "files", "predictions", "inputs", "promotions")
DELTA_FLOOR_HOURS = int(SAFE_AGE.total_seconds() // 3600)
"""Lowest retention that Delta accepts by default: readers and writers may still need files removed more recently."""
RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
MAX_FILE_SIZE = "spark.databricks.delta.optimize.maxFileSize"


def _check_floor(config: MaintainConfig, spark: SparkSession) -> None:
    if config.vacuum_hours < DELTA_FLOOR_HOURS and spark.conf.get(RETENTION_CHECK, "true") != "false":
        raise WrongInput(
            f"maintain.vacuum_hours is {config.vacuum_hours}, but Delta retains at least {DELTA_FLOOR_HOURS} hours: "
            f"give that, or set {RETENTION_CHECK} to false in spark.conf when nothing reads or writes the tables"
        )


def _vacuum(spark: SparkSession, path: str, files: Iterable[DataFile], hours: int) -> None:
    """Delete these files of the table with VACUUM, except those that Delta's retention protects.

    Args:
        spark: The session.
        path: Path or URL of the table.
        files: The files.
        hours: Delta's retention in hours.
    """
    folder = data_folder(spark, path)
    rows = [
        {
            "path": f"{folder}/{file.name}",
            "length": file.bytes,
            "isDir": False,
            "modificationTime": int(file.modified_at.timestamp() * 1000),
        }
        for file in files
    ]
    view = f"inventory_{uuid4().hex}"
    spark.createDataFrame(pa.Table.from_pylist(rows)).createOrReplaceTempView(view)
    try:
        table = path.replace("`", "``")
        text = f"VACUUM delta.`{table}` USING INVENTORY (SELECT * FROM {view}) RETAIN {hours} HOURS"  # noqa: S608  # SQL has no parameter for a table's name; it is quoted
        commit(path, lambda: spark.sql(text))
    finally:
        spark.catalog.dropTempView(view)


def maintain_table(spark: SparkSession, path: str, config: MaintainConfig, kept: list[int] | None) -> TableMaintenance:
    """Compact one table and delete the files that no kept version needs.

    Args:
        spark: The session.
        path: Path or URL of the table.
        config: Retention and file size.
        kept: Versions to keep; None if they are not known, so that no file is deleted.
    """
    found = snapshots.newest_snapshot(spark, path)
    assert found is not None, path
    versions = kept or []
    missing = {name: value for name, value in KEEP_LOG.items() if found.properties.get(name) != value}
    if versions and missing:
        # Otherwise Delta removes the part of the log that names the files of those versions.
        delta.set_properties(spark, path, missing)
    spark.conf.set(MAX_FILE_SIZE, str(config.file_megabytes << 20))
    compaction = DeltaTable.forPath(spark, path).optimize()
    metrics = commit(path, compaction.executeCompaction).collect()[0]["metrics"]
    before = list_files(path)
    removable = [] if kept is None else removable_files(spark, path, kept, config.vacuum_hours, datetime.now(UTC))
    if removable:
        _vacuum(spark, path, removable, config.vacuum_hours)
    left = {file.name for file in list_files(path)}
    deleted = [file for file in before if file.name not in left]
    done = TableMaintenance(
        table=snapshots.latest(spark, path),
        files_compacted=metrics["numFilesRemoved"],
        files_written=metrics["numFilesAdded"],
        files_deleted=len(deleted),
        bytes_deleted=sum(file.bytes for file in deleted),
        retention_hours=config.vacuum_hours,
        kept_versions=versions,
    )
    logger.info(
        "%s: %d files compacted into %d, %d files deleted (%.1f MB) that no version of the last %d hours and no "
        "pin needs; versions kept for models: %s",
        path, done.files_compacted, done.files_written, done.files_deleted, done.bytes_deleted / 1e6,
        done.retention_hours, versions or "none",
    )  # fmt: skip
    return done


def maintain_tables(config: MaintainConfig, storage: Storage, spark_config: SparkConfig) -> MaintenanceReport:
    """Compact and vacuum the existing tables; versions that registered models were trained from are kept.

    Where these are not known, no file of `images` and no prediction is removed.

    Raises:
        WrongInput: Delta does not accept the retention, a table's path is not a Delta table, or a table is not
            writable. Another tracking server has the models, as `kept_versions`.
        TrackingUnavailable: The tracking server does not answer.
        DiskFull: The disk has no space left.
    """
    paths = [storage.table(name) for name in TABLES]
    for path in (path for path in paths if delta.check_table_path(path)):
        check_writable(path, "storage.tables")
    with spark_session(spark_config, storage) as spark:
        _check_floor(config, spark)
        with (
            write_access(storage.table("images"), spark),
            write_access(storage.table("predictions"), spark),
            write_access(storage.table("inputs"), spark),
            write_access(storage.table("promotions"), spark),
            translate_disk_full(storage.tables, storage.home),
        ):
            # Looked up after the locks are acquired: a model may have been registered while waiting for them.
            found = [path for path in paths if delta.check_table_path(path)]
            kept = kept_versions(spark, config, storage)
            images, predictions = storage.table("images"), storage.table("predictions")
            if config.keep_model_versions is not None and predictions in found:
                if kept is None and not config.trust_tracking:
                    logger.warning("%s: all predictions stay, as the files of the table images", predictions)
                else:
                    delete_old_predictions(spark, predictions, config, storage)
            done = [maintain_table(spark, path, config, kept if path == images else []) for path in found]
    return MaintenanceReport(tables=done)
