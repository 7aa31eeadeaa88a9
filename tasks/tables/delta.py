"""Delta tables: their log, properties, and writes by Spark (create, append, merge), one commit each."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import pyarrow.parquet as pq
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from tasks.errors import WrongInput
from tasks.object_store import PROBE, file_system, list_names
from tasks.paths import local_path
from tasks.tables.delta_internals import check_version
from tasks.tables.properties import OTHER_TABLES, join_properties, split_properties
from tasks.tables.writer import TableChanged, commit, is_unsure

COMMIT_NAME = re.compile(r"\d{20}\..*(json|parquet)")
COMMITTED_NAME = re.compile(r"\d{20}\.json")
CREATION_MARK = "_creation"
"""An empty object in the log of a table that was created on a store; readers ignore it."""

TRANSACTION = "lakevision"
"""Name of the transactions (txnAppId) of commits that are based on one version, whose successor is their number.

Delta takes the appends of two drivers for independent of each other, unless both name the same transaction.
"""

DATA_NAME = re.compile(r"\.?part-\d{5}-.*\.parquet(\.crc|#\d+)?")
"""Name of a data file, its checksum, or a part of it that delta-rs has not finished."""

PARTITION_NAME = re.compile(r"[^=]+=.*")


def check_table_path(path: str, setting: str = "storage.tables") -> bool:
    """Return whether a Delta table exists at `path`, which a setting gives, without Spark.

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
            f"'{path}' is not a Delta table (it has no _delta_log)",
            setting=setting,
            way_out=f"move the existing files, or give {OTHER_TABLES}",
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
    log = f"{path.rstrip('/')}/_delta_log"
    names = list_names(log)
    files = [f"{number:020}.json" for number in range(0 if version is None else version + 1, _newest(names) + 1)]
    if not set(files) <= set(names):
        sidecars = list_names(f"{log}/_sidecars")  # of V2 checkpoints
        files = list(filter(COMMIT_NAME.fullmatch, names))
        files += [f"_sidecars/{name}" for name in sidecars if name.endswith(".parquet")]
    return {name for file in files for name in _named_by(filesystem, f"{root}/_delta_log/{file}")}


def _newest(names: Iterable[str]) -> int:
    """Return the newest version in a log with these files, -1 for a log without commits."""
    return max((int(name[:20]) for name in names if COMMIT_NAME.fullmatch(name)), default=-1)


def _named_by(filesystem: Any, file: str) -> Iterator[str]:
    """Yield the names of the files that a commit, a checkpoint or a part of a checkpoint adds or removes."""
    kinds = ("add", "remove", "cdc")
    if file.endswith(".json"):
        found = _read_commit(filesystem, file)
    else:
        with filesystem.open(file, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            columns = [f"{name}.path" for name in parquet.schema_arrow.names if name in kinds]
            found = parquet.read(columns=columns).to_pylist()
    for action in found:
        yield from (unquote(action[kind]["path"]) for kind in kinds if action.get(kind) is not None)


def last_change(path: str, version: int | None = None) -> int:
    """Return the version at which rows last changed up to a version, without Spark; compaction changes only files.

    A commit that has been removed from the log counts as a change.

    Args:
        path: Path or URL of the table.
        version: By default, the newest one.
    """
    filesystem, root = file_system(path)
    names = set(list_names(f"{path.rstrip('/')}/_delta_log"))
    for number in range(_newest(names) if version is None else version, -1, -1):
        name = f"{number:020}.json"
        if name not in names:
            return number
        actions = _read_commit(filesystem, f"{root}/_delta_log/{name}")
        if any(change["dataChange"] for action in actions if (change := action.get("add") or action.get("remove"))):
            return number
    return 0


def _read_commit(filesystem: Any, file: str) -> list[dict[str, Any]]:
    """Return the actions of a commit's file."""
    with filesystem.open(file, "rb") as opened:
        return [json.loads(line) for line in opened]


def _actions_after(path: str, version: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield version and actions of the commits after a version, without those that the log no longer has."""
    filesystem, root = file_system(path)
    for name in sorted(filter(COMMITTED_NAME.fullmatch, list_names(f"{path.rstrip('/')}/_delta_log"))):
        if int(name[:20]) > version:
            yield int(name[:20]), _read_commit(filesystem, f"{root}/_delta_log/{name}")


@dataclass(frozen=True)
class Commit:
    """A commit of a table.

    Attributes:
        version: The version that it made.
        num_files: Number of files from which the change data feed has its rows; 0 if it changed none.
        seconds: Its time, in seconds since 1970.
    """

    version: int
    num_files: int
    seconds: float


def commits_after(path: str, version: int) -> list[Commit]:
    """Return the commits after a version in their order, without Spark and without those that the log no longer has."""
    found = []
    for number, actions in _actions_after(path, version):
        num_changes = sum("cdc" in action for action in actions)
        files = [action[kind] for action in actions for kind in ("add", "remove") if kind in action]
        info: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        at = info.get("inCommitTimestamp") or info.get("timestamp") or 0
        found.append(Commit(number, num_changes or sum(file["dataChange"] for file in files), at / 1000))
    return found


def set_properties(spark: SparkSession, path: str, values: Mapping[str, str]) -> None:
    """Set table properties, in one commit."""
    commit(path, lambda: _set_properties(spark, path, values))


def _set_properties(spark: SparkSession, path: str, values: Mapping[str, str]) -> None:
    listed = ", ".join(f"'{name}' = '{_quoted(value)}'" for name, value in values.items())
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({listed})")


def add_columns(spark: SparkSession, path: str, columns: Sequence[StructField]) -> None:
    """Add columns to the end of a table, in one commit; they are null in existing rows."""
    listed = ", ".join(f"`{column.name}` {column.dataType.simpleString()}" for column in columns)
    commit(path, lambda: spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMNS ({listed})"))


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
    new = rows.write.format("delta").mode("errorifexists").options(**values)
    _create(path, lambda: new.partitionBy(*partition_by).save(path))


def _create(path: str, work: Callable[[], None]) -> None:
    """Create the table as `create_table` by a function, with files in its folder that the rows may come from."""
    if local_path(path) is None:
        mark_creation(path)
    try:
        commit(path, work)
    except Exception as error:
        if newest_commit(path) is not None:
            raise TableChanged(path) from error
        if not is_unsure(path):
            clear_uncommitted(path)  # After a full disk, the files would still occupy space.
        raise


def append_files(
    spark: SparkSession,
    path: str,
    files: Iterable[str],
    version: int | None,
    schema: StructType,
    values: Mapping[str, str],
) -> None:
    """Append the rows of Parquet files to a table by Spark, which copies them; create the table if it does not exist.

    Of two drivers that commit after the same version, one gets TableChanged.

    Args:
        spark: The session.
        path: Path or URL of the table.
        files: Paths or URLs of the files.
        version: The table's version that the rows are based on, None if the table did not exist.
        schema: Columns of the table and of the files.
        values: Properties of a new table.

    Raises:
        TableChanged: The table is at another version.
    """
    rows = spark.read.schema(schema).parquet(*files)
    if version is None:

        def create() -> None:
            # Spark's writer keeps Delta's own properties alone: the others follow, and are noted for `complete_table`.
            options = {**values, "userMetadata": split_properties(values)[1]}
            rows.write.format("delta").mode("errorifexists").options(**options).save(path)
            _set_properties(spark, path, values)

        _create(path, create)
        return
    check_version(spark, path, version)
    attempt = uuid4().hex
    options = {"txnAppId": TRANSACTION, "txnVersion": str(version + 1), "userMetadata": attempt}
    commit(path, lambda: rows.write.format("delta").mode("append").options(**options).save(path))
    _check_committed(path, version, attempt)


def complete_table(spark: SparkSession, path: str) -> None:
    """Set the properties of a new table whose driver was killed after the first commit of `append_files`."""
    noted = [join_properties({}, note) for note in user_metadata_since(path, -1)]
    if values := next(filter(None, noted), None):
        set_properties(spark, path, values)


def _check_committed(path: str, version: int, attempt: str) -> None:
    """Check that a commit was made: Delta leaves it out without a word if the table has its transaction already.

    Raises:
        TableChanged: It was left out.
    """
    if attempt not in user_metadata_since(path, version):
        raise TableChanged(path)


def user_metadata_since(path: str, version: int) -> set[str]:
    """Return what commits after `version` were given as `userMetadata`, without Spark."""
    found = (action.get("commitInfo", {}) for _, actions in _actions_after(path, version) for action in actions)
    return {info["userMetadata"] for info in found if info.get("userMetadata") is not None}


def replace_rows(
    spark: SparkSession, path: str, version: int, rows: DataFrame, key: str, gone: DataFrame | None = None
) -> None:
    """Replace the rows with the keys of `rows`, insert the others, and delete those with the keys of `gone`: a MERGE.

    Args:
        spark: The session.
        path: Path or URL of the table.
        version: The table's version that the rows are based on.
        rows: Rows with all columns of the table.
        key: The column of the key.
        gone: Keys of rows to delete; those of `rows` do not count.

    Raises:
        TableChanged: The table is at another version.
    """
    changes = rows.withColumn("is_gone", F.lit(False))  # Spark's literal
    if gone is not None:
        deleted = gone.join(rows, on=key, how="left_anti").withColumn("is_gone", F.lit(True))
        changes = changes.unionByName(deleted, allowMissingColumns=True)
    check_version(spark, path, version)
    attempt, session = uuid4().hex, spark.newSession()  # whose settings are those of this commit alone
    session.conf.set("spark.databricks.delta.write.txnAppId", TRANSACTION)
    session.conf.set("spark.databricks.delta.write.txnVersion", str(version + 1))
    session.conf.set("spark.databricks.delta.commitInfo.userMetadata", attempt)
    commit(path, merge_changes(session, path, changes, (key,), rows.columns).execute)
    _check_committed(path, version, attempt)


def with_schema(rows: DataFrame, schema: StructType) -> DataFrame:
    """Select the columns of `schema` in its order, cast to its types."""
    return rows.select(*(rows[field.name].cast(field.dataType).alias(field.name) for field in schema))


def no_rows(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a frame without rows; of an empty list, a Python worker makes it, whose daemon takes seconds to start."""
    return spark.createDataFrame(to_arrow_schema(schema, timezone="UTC").empty_table(), schema)


def with_nulls(rows: DataFrame, columns: Iterable[StructField]) -> DataFrame:
    """Add columns without values."""
    return rows.withColumns({column.name: F.lit(None).cast(column.dataType) for column in columns})


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


def merge_changes(spark: SparkSession, path: str, rows: DataFrame, key: tuple[str, ...], columns: Sequence[str]) -> Any:
    """Build a MERGE of `rows` with these columns of the table, and a column `is_gone` for rows to delete."""
    values = {name: f"s.{name}" for name in columns}
    merging = merge(spark, path, rows, key).whenMatchedDelete("s.is_gone").whenMatchedUpdate(set=values)
    return merging.whenNotMatchedInsert("NOT s.is_gone", values=values)
