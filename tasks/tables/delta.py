"""Delta tables: their log, properties, and writes (create, merge, commit of files), one commit each."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import reduce
from operator import and_
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

import pyarrow.parquet as pq
from delta.exceptions import DeltaConcurrentModificationException
from delta.tables import DeltaTable
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from tasks.errors import WrongInput
from tasks.object_store import PROBE, file_system, list_names
from tasks.paths import local_path
from tasks.spark.file_systems import prepare_store
from tasks.tables.properties import OTHER_TABLES

COMMIT_NAME = re.compile(r"\d{20}\..*(json|parquet)")
COMMITTED_NAME = re.compile(r"\d{20}\.json")
CREATION_MARK = "_creation"
"""An empty object in the log of a table that was created on a store; readers ignore it."""

DATA_NAME = re.compile(r"\.?part-\d{5}-.*\.parquet(\.crc|#\d+)?")
"""Name of a data file, its checksum, or a part of it that delta-rs has not finished."""
PARTITION_NAME = re.compile(r"[^=]+=.*")


def check_table_path(path: str) -> bool:
    """Return whether a Delta table exists at `path`, without Spark.

    Raises:
        WrongInput: The path exists, and is not a Delta table.
    """
    filesystem, root = file_system(path)
    if not filesystem.exists(root):
        return False
    if filesystem.exists(f"{root}/_delta_log"):
        return newest_commit(path) is not None
    if not filesystem.isdir(root) or not all(name.startswith(PROBE) for name in list_names(path)):
        raise WrongInput(
            f"'{path}' is not a Delta table (it has no _delta_log): move the existing files, or give {OTHER_TABLES}"
        )
    return False


def newest_commit(path: str) -> str | None:
    """Return the file name of the newest commit in the table's log, without Spark; None for a log without commits."""
    return max(filter(COMMIT_NAME.fullmatch, list_names(f"{path.rstrip('/')}/_delta_log")), default=None)


def clear_uncommitted(path: str, keep: str | None = None) -> None:
    """Remove the files of a run that was killed while it created the table: Delta can neither read nor replace them.

    These are a log without commits and uncommitted data files. The caller has an exclusive lock on the table. On a
    store, which has no locks, nothing is removed: another run may be about to commit its files.

    Args:
        path: Path or URL of the table.
        keep: Prefix of names in the log that stay, and the log with them; by default, none does.
    """
    if local_path(path) is None:
        return
    filesystem, root = file_system(path)
    if not filesystem.exists(f"{root}/_delta_log") or newest_commit(path) is not None:
        return
    for name in filesystem.ls(root, detail=False):
        file = name.rsplit("/", 1)[-1]
        if DATA_NAME.fullmatch(file) or file.startswith(PROBE):
            filesystem.rm(name)
        elif PARTITION_NAME.fullmatch(file) and all(
            DATA_NAME.fullmatch(found.rsplit("/", 1)[-1]) for found in filesystem.find(name)
        ):
            filesystem.rm(name, recursive=True)
    log = f"{root}/_delta_log"
    names = set(list_names(log))
    kept = {name for name in names if keep is not None and name.startswith(keep)}
    for found in [f"{log}/{name}" for name in names - kept] if kept else [log]:
        filesystem.rm(found, recursive=True)


def mark_creation(path: str) -> None:
    """Begin the log of a new table, so that files of a killed run are not taken for those of something else."""
    filesystem, root = file_system(path)
    if local_path(path) is None:
        filesystem.pipe_file(f"{root}/_delta_log/{CREATION_MARK}", b"")
    else:
        filesystem.makedirs(f"{root}/_delta_log", exist_ok=True)


def added_since(path: str, version: int | None) -> set[str]:
    """Return the data files that commits after `version` added, relative to the table's folder, without Spark.

    Delta removes old commits once a checkpoint covers them. If a commit after `version` has been removed, all files
    are returned that the rest of the log names. These are the files of every version that can still be read, and those
    that were removed so recently that VACUUM keeps them.

    Args:
        path: Path or URL of the table.
        version: None for all commits.
    """
    filesystem, root = file_system(path)
    log = f"{root}/_delta_log"
    names = {found.rsplit("/", 1)[-1] for found in filesystem.ls(log, detail=False)}
    commits = {int(name[:20]): name for name in names if COMMITTED_NAME.fullmatch(name)}
    newest = max((int(name[:20]) for name in names if COMMIT_NAME.fullmatch(name)), default=-1)
    wanted = range(0 if version is None else version + 1, newest + 1)
    if all(number in commits for number in wanted):
        files = [commits[number] for number in wanted]
    else:
        files = [name for name in names if COMMIT_NAME.fullmatch(name)]
        if filesystem.exists(f"{log}/_sidecars"):  # of V2 checkpoints
            sidecars = (found.rsplit("/", 1)[-1] for found in filesystem.ls(f"{log}/_sidecars", detail=False))
            files += [f"_sidecars/{name}" for name in sidecars if name.endswith(".parquet")]
    return {name for file in files for name in _named_by(filesystem, f"{log}/{file}")}


def _named_by(filesystem: Any, file: str) -> Iterator[str]:
    """Yield the names of the files that a commit, a checkpoint or a part of a checkpoint adds or removes."""
    kinds = ("add", "remove", "cdc")
    if file.endswith(".json"):
        found = read_commit(filesystem, file)
    else:
        with filesystem.open(file, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            columns = [f"{name}.path" for name in parquet.schema_arrow.names if name in kinds]
            found = parquet.read(columns=columns).to_pylist()
    for action in found:
        yield from (file_name(action[kind]["path"]) for kind in kinds if action.get(kind) is not None)


def rows_changed_since(path: str, version: int) -> bool:
    """Return whether a commit after `version` changed rows, without Spark; compaction changes only files.

    The result is True if one of these commits has been removed from the log, since it may have changed rows.
    """
    filesystem, root = file_system(path)
    log = f"{root}/_delta_log"
    names = {found.rsplit("/", 1)[-1] for found in filesystem.ls(log, detail=False)}
    newest = max((int(name[:20]) for name in names if COMMIT_NAME.fullmatch(name)), default=-1)
    commits = [f"{number:020}.json" for number in range(version + 1, newest + 1)]
    if not names.issuperset(commits):
        return True
    actions = (action for commit in commits for action in read_commit(filesystem, f"{log}/{commit}"))
    changes = (action.get("add") or action.get("remove") for action in actions)
    return any(change["dataChange"] for change in changes if change)


def read_commit(filesystem: Any, file: str) -> list[dict[str, Any]]:
    """Return the actions of a commit's file."""
    with filesystem.open(file, "rb") as opened:
        return [json.loads(line) for line in opened]


def file_name(path: str) -> str:
    """Return the name of a data file relative to the table's folder, from its percent-encoded path in the log."""
    return unquote(path)


def _delta_log(spark: SparkSession, path: str) -> Any:
    prepare_store(spark, path)
    jvm: Any = spark._jvm
    return jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)


def newest_in_log(spark: SparkSession, path: str) -> Any:
    """Return the JVM object of the newest snapshot in Delta's log; its version is negative without a table."""
    none = _scala_none(spark._jvm)
    return _delta_log(spark, path).update(False, none, none)


def snapshot_at(spark: SparkSession, path: str, version: int) -> Any:
    """Return the JVM object of the snapshot of a version that the log can be replayed to."""
    none = _scala_none(spark._jvm)
    return _delta_log(spark, path).getSnapshotAt(version, none, none)


def vacuum_files(spark: SparkSession, path: str, files: Iterable[tuple[str, int, datetime]], hours: int) -> None:
    """Delete these files of the table with VACUUM, except those that Delta's retention protects.

    Args:
        spark: The session.
        path: Path or URL of the table.
        files: Name relative to the table's folder, size in bytes and time of last modification of each file.
        hours: Delta's retention in hours.
    """
    folder = str(_delta_log(spark, path).dataPath())  # as in Delta's own listing: with a scheme, not percent-encoded
    rows = [(f"{folder}/{name}", size, False, int(at.timestamp() * 1000)) for name, size, at in files]
    inventory = spark.createDataFrame(rows, "path string, length long, isDir boolean, modificationTime long")
    view = f"inventory_{uuid4().hex}"
    inventory.createOrReplaceTempView(view)
    try:
        table = path.replace("`", "``")
        spark.sql(f"VACUUM delta.`{table}` USING INVENTORY (SELECT * FROM {view}) RETAIN {hours} HOURS")  # noqa: S608  # SQL has no parameter for a table's name; it is quoted
    finally:
        spark.catalog.dropTempView(view)


def _scala_none(jvm: Any) -> Any:
    return getattr(getattr(jvm.scala, "None$"), "MODULE$")


def set_properties(spark: SparkSession, path: str, values: Mapping[str, str]) -> None:
    """Set table properties, in one commit."""
    listed = ", ".join(f"'{name}' = '{_quoted(value)}'" for name, value in values.items())
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({listed})")


def add_columns(spark: SparkSession, path: str, columns: Sequence[StructField]) -> None:
    """Add columns to the end of a table, in one commit; they are null in existing rows."""
    listed = ", ".join(f"`{column.name}` {column.dataType.simpleString()}" for column in columns)
    spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMNS ({listed})")


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")


def create_table(path: str, rows: DataFrame, values: Mapping[str, str], partition_by: Sequence[str] = ()) -> None:
    """Create the table with its first rows, properties and partition columns in one commit; fail if it exists.

    The caller has an exclusive lock on the table: files of a killed run are removed, except on a store. They do not
    hinder a write to a path, unlike `CREATE TABLE AS SELECT`.

    Raises:
        TableChanged: Another driver created the table meanwhile.
    """
    clear_uncommitted(path)
    if local_path(path) is None:
        mark_creation(path)
    try:
        new = rows.write.format("delta").mode("errorifexists").options(**values)
        new.partitionBy(*partition_by).save(path)
    except Exception as error:
        if newest_commit(path) is not None:
            raise TableChanged(path) from error
        clear_uncommitted(path)  # After a full disk, the files would still occupy space.
        raise


class TableChanged(RuntimeError):
    """Conflict: another program committed to a table between this run's read and its commit."""

    def __init__(self, path: str) -> None:
        super().__init__(f"another program wrote to '{path}' during this run: run again")


@contextmanager
def translate_conflict(path: str) -> Iterator[None]:
    """Translate Delta's exceptions for concurrent commits into TableChanged."""
    try:
        yield
    except DeltaConcurrentModificationException as error:
        raise TableChanged(path) from error
    except Py4JJavaError as error:  # Raised by JVM methods that are not called through Delta's Python API.
        java = "io.delta.exceptions.DeltaConcurrentModificationException"
        if not is_instance_of(SparkContext._gateway, error.java_exception, java):
            raise
        raise TableChanged(path) from error


def check_version(spark: SparkSession, path: str, version: int) -> None:
    """Check that `version`, which was read before, is still the newest.

    Raises:
        TableChanged: The table is at another version.
    """
    if newest_in_log(spark, path).version() != version:
        raise TableChanged(path)


def can_replace_files(spark: SparkSession, path: str) -> bool:
    """Return whether a file of the table can be replaced by a Parquet file with other rows.

    This is not so if another program gave the table partitions, or features that readers must support, such as
    deletion vectors and column mapping.
    """
    snapshot = newest_in_log(spark, path)
    return bool(snapshot.protocol().minReaderVersion() == 1 and snapshot.metadata().partitionColumns().isEmpty())


def has_change_feed(spark: SparkSession, path: str) -> bool:
    """Return whether the table has a change data feed."""
    values = newest_in_log(spark, path).metadata().configuration()
    return bool(values.get("delta.enableChangeDataFeed").contains("true"))


def commit_files(
    spark: SparkSession,
    path: str,
    files: Mapping[str, int],
    version: int | None,
    schema: StructType,
    values: Mapping[str, str],
    removed: Iterable[str] = (),
    changes: Iterable[str] = (),
) -> None:
    """Commit Parquet files that are already in the table's folder; create the table if it does not exist.

    The actions are built as JSON (Delta's PROTOCOL.md, "Actions"); the transaction is Delta's own.

    Args:
        spark: The session.
        path: Path or URL of the table.
        files: Names of the files, with their numbers of rows.
        version: The table's version that the rows are based on, None if the table did not exist.
        schema: Columns of the table and of the files; used only to create the table, as are `values`.
        values: Table properties.
        removed: Names of files to remove from the table.
        changes: Names of files for the change data feed, relative to the table's folder; the feed of this commit has
            only these.

    Raises:
        TableChanged: The table is at another version.
    """
    jvm: Any = spark._jvm
    delta = jvm.org.apache.spark.sql.delta
    transaction = _delta_log(spark, path).startTransaction()
    if transaction.readVersion() != (-1 if version is None else version):
        raise TableChanged(path)
    if version is None:
        metadata = {
            "id": str(uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": schema.json(),
            "partitionColumns": [],
            "configuration": dict(values),
            "createdTime": int(time.time() * 1000),
        }
        transaction.updateMetadataForNewTable(delta.actions.Action.fromJson(json.dumps({"metaData": metadata})))
    transaction.readWholeTable()  # so that a concurrent commit is a conflict
    actions = jvm.java.util.ArrayList()
    filesystem, root = file_system(path)
    for name, num_rows in files.items():
        found = filesystem.info(f"{root}/{name}")
        add = {
            "path": quote(name),
            "partitionValues": {},
            "size": found["size"],
            "modificationTime": int(filesystem.modified(f"{root}/{name}").timestamp() * 1000),
            "dataChange": True,
            "stats": json.dumps({"numRecords": num_rows}),
        }
        actions.add(delta.actions.Action.fromJson(json.dumps({"add": add})))
    for name in removed:
        remove = {
            "path": quote(name),
            "deletionTimestamp": int(time.time() * 1000),
            "dataChange": True,
            "extendedFileMetadata": True,
            "partitionValues": {},
            "size": filesystem.size(f"{root}/{name}"),
        }
        actions.add(delta.actions.Action.fromJson(json.dumps({"remove": remove})))
    for name in changes:
        size = filesystem.size(f"{root}/{name}")
        change = {"path": quote(name), "partitionValues": {}, "size": size, "dataChange": False}
        actions.add(delta.actions.Action.fromJson(json.dumps({"cdc": change})))
    operation = delta.DeltaOperations.Write(jvm.org.apache.spark.sql.SaveMode.Append, *[_scala_none(jvm)] * 3)
    with translate_conflict(path):
        transaction.commit(jvm.scala.jdk.javaapi.CollectionConverters.asScala(actions).toSeq(), operation)


def with_schema(rows: DataFrame, schema: StructType) -> DataFrame:
    """Select the columns of `schema` in its order, cast to its types."""
    return rows.select(*(rows[field.name].cast(field.dataType).alias(field.name) for field in schema))


def merge(
    spark: SparkSession, path: str, rows: DataFrame, key: tuple[str, ...], where: Mapping[str, str | int] | None = None
) -> Any:
    """Build a MERGE of `rows` (alias s) into the table (alias t) on `key`.

    Args:
        spark: The session.
        path: Path or URL of the table.
        rows: The rows.
        key: Columns of the key.
        where: Value of a column in all of `rows`; Delta does not read files of the table without such a value.
    """
    condition = reduce(and_, [F.col(f"t.{name}") == F.col(f"s.{name}") for name in key])
    for name, value in (where or {}).items():
        condition &= F.col(f"t.{name}") == F.lit(value)
    return DeltaTable.forPath(spark, path).alias("t").merge(rows.alias("s"), condition)
