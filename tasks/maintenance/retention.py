"""Selection of the data files to keep: those of the newest, of recent and of trained-on versions."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from tasks.object_store import file_system
from tasks.tables import delta
from tasks.tables.delta_internals import named_files

logger = logging.getLogger("lakevision.maintenance")

SAFE_AGE = timedelta(hours=168)
"""Minimum age of uncommitted files to remove, since a running writer may be about to commit younger ones.

This is Delta's default retention, and the lowest that VACUUM accepts without a change of settings.
"""

CHANGE_DATA = "_change_data"
VECTORS = re.compile(r"(.*/)?deletion_vector_[^/]*\.bin")
COMMIT = re.compile(r"(\d{20})\.json")
CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\b.*")


@dataclass(frozen=True)
class DataFile:
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
    kept = delta.added_since(path, since)
    named = named_files(spark, path, {since, *versions} & loadable)
    kept |= {unquote(name) for name in named.kept}
    removed = {unquote(name) for name in named.removed}
    return [
        file
        for file in list_files(path)
        if file.name not in kept
        and file.modified_at <= cutoff
        and (file.name in removed or file.modified_at <= now - SAFE_AGE)
        # A kept version may need any file of deletion vectors; they are few and small.
        and not (named.has_vectors and VECTORS.fullmatch(file.name))
    ]
