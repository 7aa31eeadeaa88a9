"""Compaction of the Delta tables, and removal of old predictions and of files that no kept version needs."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.config.maintenance import MaintainConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.commits import KEEP_LOG
from tasks.etl.own_folders import TABLES
from tasks.maintenance.kept_versions import kept_versions
from tasks.object_store import file_system
from tasks.refs import MaintenanceReport, TableMaintenance
from tasks.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS
from tasks.spark.session import spark_session
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.tables import delta, snapshots
from tasks.tables.delta_internals import data_folder, named_files
from tasks.tables.writer import commit, write_access
from tasks.tracking.models import has_model, model_with_alias

logger = logging.getLogger("lakevision.maintenance")

SAFE_AGE = timedelta(hours=168)
"""Minimum age of uncommitted files to remove, since a running writer may be about to commit younger ones.

This is Delta's default retention, and the lowest that VACUUM accepts without a change of settings.
"""

DELTA_FLOOR_HOURS = int(SAFE_AGE.total_seconds() // 3600)
"""Lowest retention that Delta accepts by default: readers and writers may still need files removed more recently."""
RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
MAX_FILE_SIZE = "spark.databricks.delta.optimize.maxFileSize"

CHANGE_DATA = "_change_data"
VECTORS = re.compile(r"(.*/)?deletion_vector_[^/]*\.bin")
COMMIT = re.compile(r"(\d{20})\.json")
CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\b.*")


class DataFile(NamedTuple):
    """A file in the table's folder; its name is relative to the folder."""

    name: str
    bytes: int
    modified_at: datetime


def loadable_versions(log_names: Iterable[str]) -> set[int]:
    """Return the versions that can still be reconstructed from a table's log.

    Args:
        log_names: Names of the files in `_delta_log`.
    """
    names = list(log_names)
    commits = {int(found[1]) for name in names if (found := COMMIT.fullmatch(name))}
    starts = {int(found[1]) for name in names if (found := CHECKPOINT.fullmatch(name))}
    loadable: set[int] = set()
    for version in sorted(commits | starts):
        if version in starts or (version in commits and (version == 0 or version - 1 in loadable)):
            loadable.add(version)
    return loadable


def list_files(path: str) -> list[DataFile]:
    """List the files in the table's folder, without its log and hidden files, which Delta ignores, too."""
    filesystem, root = file_system(path)
    filesystem.invalidate_cache()
    files = []
    for found, info in filesystem.find(root, detail=True).items():
        name = found[len(root) :].lstrip("/")
        first, *rest = name.split("/")
        if any(part.startswith((".", "_")) for part in (rest if first == CHANGE_DATA else (first, *rest))):
            continue
        modified = next((info[key] for key in ("mtime", "LastModified", "last_modified") if key in info), None)
        if isinstance(modified, int | float):
            modified = datetime.fromtimestamp(modified, UTC)
        elif not isinstance(modified, datetime):
            modified = filesystem.modified(found)
        files.append(DataFile(name, info["size"], modified))
    return files


def removable_files(
    spark: SparkSession, path: str, versions: Sequence[int], vacuum_hours: int, now: datetime
) -> list[DataFile]:
    """Return the files that belong to neither the newest version, nor a kept one, nor one younger than `vacuum_hours`.

    The age of a version counts from the commit that replaced it. Files younger than SAFE_AGE are returned only if a
    commit removed them, since others may be about to be committed.

    Args:
        spark: The session.
        path: Path or URL of the table.
        versions: Versions to keep; a warning names those that can no longer be reconstructed from the log.
        vacuum_hours: Age in hours.
        now: Current time, with a time zone.
    """
    filesystem, root = file_system(path)
    loadable = loadable_versions(name.rsplit("/", 1)[-1] for name in filesystem.ls(f"{root}/_delta_log", detail=False))
    if missing := sorted(set(versions) - loadable):
        logger.warning("%s: the log no longer holds version %s, which a model was trained from", path, missing)
    cutoff = now - timedelta(hours=vacuum_hours)
    history = DeltaTable.forPath(spark, path).history().select("version", "timestamp").collect()
    committed = {row["version"]: row["timestamp"].astimezone(UTC) for row in history if row["version"] in loadable}
    # The version that was the newest at the cutoff, and all later ones.
    since = max((version for version, at in committed.items() if at <= cutoff), default=min(committed))
    named = named_files(spark, path, {since, *versions} & loadable)
    kept = delta.added_since(path, since) | named.kept
    return [
        file
        for file in list_files(path)
        if file.name not in kept
        and file.modified_at <= cutoff
        and (file.name in named.removed or file.modified_at <= now - SAFE_AGE)
        # A kept version may need any file of deletion vectors; they are few and small.
        and not (named.has_vectors and VECTORS.fullmatch(file.name))
    ]


def delete_old_predictions(spark: SparkSession, path: str, config: MaintainConfig, storage: Storage) -> None:
    """Delete the rows of `predictions` by all but the newest versions of each model, in one commit.

    Rows of the versions with the aliases `champion`, `previous` and `challenger` stay, whatever their number. So do
    those of models that this tracking server does not have, whose aliases are not known, except with `release_pins`.

    Args:
        spark: The session.
        path: Path or URL of the table.
        config: `keep_model_versions`, the number of versions of each model to keep, and `release_pins`.
        storage: Storage with the tracking URI.
    """
    keep = config.keep_model_versions
    assert keep is not None, "otherwise all are kept"
    rows = snapshots.read_version(spark, snapshots.latest(spark, path))
    found: dict[str, list[int]] = defaultdict(list)
    for name, version in rows.select("model_name", "model_version").distinct().collect():
        found[name].append(version)
    doomed = F.lit(False)  # Spark's literal
    removed = []
    for name, versions in sorted(found.items()):
        if not config.release_pins and not has_model(storage, name):
            logger.info("%s: predictions by %s stay, which '%s' does not have", path, name, storage.tracking_shown)
            continue
        named = {model_with_alias(storage, name, alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER)}
        kept = {model.version for model in named if model is not None} | set(sorted(versions)[-keep:])
        if old := sorted(set(versions) - kept):
            doomed |= (F.col("model_name") == name) & F.col("model_version").isin(old)
            removed += [f"{name} version {version}" for version in old]
    if removed:
        table = DeltaTable.forPath(spark, path)
        commit(path, lambda: table.delete(doomed))
        logger.info("%s: removed the predictions by %s", path, ", ".join(removed))


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
    removable = [] if kept is None else removable_files(spark, path, kept, config.vacuum_hours, datetime.now(UTC))
    if removable:
        _vacuum(spark, path, removable, config.vacuum_hours)
    left = {file.name for file in list_files(path)}
    deleted = [file for file in removable if file.name not in left]
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
    images, predictions = storage.table("images"), storage.table("predictions")
    for path in (path for path in paths if delta.check_table_path(path)):
        check_writable(path, "storage.tables")
    with spark_session(spark_config, storage) as spark:
        _check_floor(config, spark)
        with ExitStack() as held:
            for name in TABLES:
                if name != "files":  # Its runs hold the lock of `images`.
                    held.enter_context(write_access(storage.table(name), spark))
            held.enter_context(translate_disk_full(storage.tables, storage.home))
            # Looked up after the locks are acquired: a model may have been registered while waiting for them.
            found = [path for path in paths if delta.check_table_path(path)]
            kept = kept_versions(spark, config, storage)
            if config.keep_model_versions is not None and predictions in found:
                if kept is None and not config.trust_tracking:
                    logger.warning("%s: all predictions stay, as the files of the table images", predictions)
                else:
                    delete_old_predictions(spark, predictions, config, storage)
            done = [maintain_table(spark, path, config, kept if path == images else []) for path in found]
    return MaintenanceReport(tables=done)


def _check_floor(config: MaintainConfig, spark: SparkSession) -> None:
    if config.vacuum_hours < DELTA_FLOOR_HOURS and spark.conf.get(RETENTION_CHECK, "true") != "false":
        raise WrongInput(
            f"maintain.vacuum_hours is {config.vacuum_hours}, but Delta retains at least {DELTA_FLOOR_HOURS} hours",
            setting="maintain.vacuum_hours",
            way_out=f"give that, or set {RETENTION_CHECK} to false in spark.conf when nothing reads or writes the "
            "tables",
        )
