"""Snapshots of Delta's own classes in the JVM, which Delta does not promise: they cost no Spark job of a second each.

Nothing is written by them. `test_internals_of_delta_are_where_they_are_called` names the methods, and finds them in the
classes of the installed Delta.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from tasks.refs import TableRef
from tasks.spark.file_systems import prepare_store
from tasks.spark.gateway import connected_jvm
from tasks.tables.properties import join_properties, table_source
from tasks.tables.writer import TableChanged


@dataclass(frozen=True)
class Snapshot:
    """One version of a table, with its properties and columns."""

    table: TableRef
    properties: dict[str, str]
    schema: StructType


@dataclass(frozen=True)
class NamedFiles:
    """Data files that snapshots name, by their paths, which Delta's actions have percent-encoded.

    Attributes:
        kept: Files of one of the snapshots.
        removed: Files that were removed from the newest one, and that Delta still remembers.
        has_vectors: Whether a snapshot has a deletion vector.
    """

    kept: set[str]
    removed: set[str]
    has_vectors: bool


def _delta_log(spark: SparkSession, path: str) -> Any:
    prepare_store(spark, path)
    return connected_jvm().org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)


def _scala_none() -> Any:
    return getattr(getattr(connected_jvm().scala, "None$"), "MODULE$")


def _newest(spark: SparkSession, path: str) -> Any:
    none = _scala_none()
    return _delta_log(spark, path).update(False, none, none)


def newest_in_log(spark: SparkSession, path: str) -> Snapshot | None:
    """Return the newest version in Delta's log, or None without a table."""
    snapshot = _newest(spark, path)
    if snapshot.version() < 0:
        return None
    found = snapshot.metadata()
    configuration = dict(connected_jvm().scala.jdk.javaapi.CollectionConverters.asJava(found.configuration()))
    properties = join_properties(configuration, found.description())
    schema = StructType.fromJson(json.loads(found.schemaString()))
    source = table_source(properties)
    table = TableRef(path=path, version=snapshot.version(), table_id=found.id(), source=source)
    return Snapshot(table, properties, schema)


def check_version(spark: SparkSession, path: str, version: int) -> None:
    """Check that `version`, which was read before, is still the newest.

    Raises:
        TableChanged: The table is at another version.
    """
    if _newest(spark, path).version() != version:
        raise TableChanged(path)


def data_folder(spark: SparkSession, path: str) -> str:
    """Return the folder of the data files as in Delta's own listing: with a scheme, not percent-encoded."""
    return str(_delta_log(spark, path).dataPath())


def named_files(spark: SparkSession, path: str, versions: Iterable[int]) -> NamedFiles:
    """Return the data files of the newest version and of some others, to which the log can be replayed."""
    none, newest = _scala_none(), _newest(spark, path)
    kept, has_vectors = set(), False
    for snapshot in [
        newest,
        *(_delta_log(spark, path).getSnapshotAt(version, none, none, False) for version in versions),
    ]:
        for row in _as_frame(spark, snapshot.allFiles()).select("path", "deletionVector.storageType").collect():
            kept.add(unquote(row["path"]))
            has_vectors |= row["storageType"] is not None
    removed = {unquote(row["path"]) for row in _as_frame(spark, newest.tombstones()).select("path").collect()}
    return NamedFiles(kept, removed, has_vectors)


def _as_frame(spark: SparkSession, rows: Any) -> DataFrame:
    return DataFrame(rows.toDF(), spark)
