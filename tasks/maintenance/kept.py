"""Which data files of a table are kept: all that the newest, a young or a trained-on version names."""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import fsspec
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from tasks.errors import WrongInput
from tasks.paths import resolved
from tasks.refs import TableRef
from tasks.tables import delta

logger = logging.getLogger("lakevision.maintenance")

SAFE_AGE = timedelta(hours=168)
"""A file younger than this that no commit names may be one that a running writer is about to commit: Delta's own
default, and the retention below which Delta refuses to vacuum by itself."""

CHANGE_DATA = "_change_data"
VECTORS = re.compile(r"(.*/)?deletion_vector_[^/]*\.bin")
COMMIT = re.compile(r"(\d{20})\.json")
CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\b.*")


@dataclass(frozen=True)
class DataFile:
    """A file in the table's folder, by its name below it."""

    name: str
    bytes: int
    modified_at: datetime


def versions_to_keep(table: TableRef, trained: Iterable[TableRef]) -> list[int]:
    """Return the versions of this table among those that models were trained from.

    A table is recognized by its id, wherever it lies now. What was logged without an id is matched by path, and where
    that is another one, by the table's name: this table may have been moved, and another may lie at its old path now.
    Keeping too much costs disk space; keeping too little, the data of a model.
    """
    here, versions = resolved(table.path), set()
    for one in trained:
        if one.table_id and table.table_id:
            if one.table_id == table.table_id:
                versions.add(one.version)
            continue
        there = _place(one)
        if there != here and os.path.basename(there) == os.path.basename(here):
            logger.warning(
                "a model was trained from version %d of '%s', which has no table id: kept as version %d of '%s', "
                "since the table may have been moved",
                one.version, one.path, one.version, table.path,
            )  # fmt: skip
        elif there != here:
            continue
        versions.add(one.version)
    return sorted(versions)


def _place(table: TableRef) -> str:
    """Return where a table of the registry lies, or what is written there where that is no path: tags are anybody's."""
    try:
        return resolved(table.path)
    except (WrongInput, ValueError) as error:
        logger.warning(
            "a model was trained from version %d of '%s', which is not a path (%s): only its name is compared",
            table.version, table.path, error,
        )  # fmt: skip
        return table.path.rstrip("/")


def loadable_versions(log_names: Iterable[str]) -> set[int]:
    """Return the versions that a table's log can still be replayed to.

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
    """List the table's folder without its log, and without hidden names, which Delta leaves alone, too."""
    filesystem, root = fsspec.core.url_to_fs(path)
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
    """Return the files that neither the newest version, nor a kept one, nor one younger than `vacuum_hours` names.

    A version is as young as the commit that replaced it. A file younger than SAFE_AGE is among them only if a commit
    removed it: another may be about to be committed.

    Args:
        spark: The session.
        path: Path or URL of the table.
        versions: Versions to keep; one that the log cannot be replayed to any more is warned of.
        vacuum_hours: Age in hours.
        now: With a time zone.
    """
    filesystem, root = fsspec.core.url_to_fs(path)
    loadable = loadable_versions(name.rsplit("/", 1)[-1] for name in filesystem.ls(f"{root}/_delta_log", detail=False))
    if gone := sorted(set(versions) - loadable):
        logger.warning("%s: the log no longer holds version %s, which a model was trained from", path, gone)
    cutoff = now - timedelta(hours=vacuum_hours)
    history = DeltaTable.forPath(spark, path).history().select("version", "timestamp").collect()
    committed = {row["version"]: row["timestamp"].astimezone(UTC) for row in history if row["version"] in loadable}
    # The version that was the newest at the cutoff, and all that came after it.
    since = max((version for version, at in committed.items() if at <= cutoff), default=min(committed))
    kept, vectors = delta.added_since(path, since), False
    newest = delta.newest_in_log(spark, path)
    snapshots = [newest, *(delta.snapshot_at(spark, path, version) for version in {since, *versions} & loadable)]
    for snapshot in snapshots:
        for row in _as_frame(spark, snapshot.allFiles()).select("path", "deletionVector.storageType").collect():
            kept.add(delta.file_name(row["path"]))
            vectors |= row["storageType"] is not None
    removed = {delta.file_name(row["path"]) for row in _as_frame(spark, newest.tombstones()).select("path").collect()}
    return [
        file
        for file in list_files(path)
        if file.name not in kept
        and file.modified_at <= cutoff
        and (file.name in removed or file.modified_at <= now - SAFE_AGE)
        # Of these a kept version may need any; they are few and small.
        and not (vectors and VECTORS.fullmatch(file.name))
    ]


def _as_frame(spark: SparkSession, rows: Any) -> DataFrame:
    return DataFrame(rows.toDF(), spark)
