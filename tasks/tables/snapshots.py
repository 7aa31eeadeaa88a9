"""Versions of Delta tables, and what they hold: read by delta-rs and Arrow where these can, by Spark where not.

Spark takes seconds to start, and five for its first look at a table, of which it compiles most. So what lies on a local
disk is read without it; Spark reads what only it can: a store, whose credentials it has, and a table to which another
program gave newer features of the protocol.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset
from delta.tables import DeltaTable
from pyarrow.dataset import ParquetFileFormat, ParquetReadOptions
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from tasks.errors import WrongInput
from tasks.paths import local_path
from tasks.refs import TableRef
from tasks.spark.session import NeedsSpark
from tasks.tables.delta import newest_commit, newest_in_log
from tasks.tables.properties import table_source


@dataclass(frozen=True)
class Snapshot:
    """One version of a table, and the properties and columns it has there."""

    table: TableRef
    properties: dict[str, str]
    schema: StructType


def _without_spark(path: str, version: int | None = None) -> deltalake.DeltaTable | None:
    """Open a table that is there, at a version or the newest; None where only Spark can read it."""
    folder = local_path(path)
    if folder is None or "%" in str(folder):  # delta-rs decodes a percent sign once too often
        return None
    try:
        table = deltalake.DeltaTable(folder.absolute().as_uri(), version=version)
        elsewhere = any(":" in name or name.startswith("/") for name in _file_names(table))
    except deltalake.exceptions.DeltaError:
        return None  # Spark reads it, or says what is wrong with it.
    plain = table.protocol().min_reader_version == 1 and not table.metadata().partition_columns
    return table if plain and not elsewhere else None


def _file_names(table: deltalake.DeltaTable) -> list[str]:
    """Return the table's data files: names below its folder, or whole paths in a clone of another table."""
    names: list[str] = pa.table(table.get_add_actions())["path"].to_pylist()
    return names


def newest_snapshot(spark: SparkSession | None, path: str) -> Snapshot | None:
    """Return the newest version of the table, or None where no Delta table is.

    Raises:
        NeedsSpark: There is no session, and only Spark can tell.
    """
    if local_path(path) is not None and newest_commit(path) is None:
        return None
    table = _without_spark(path)
    if table is not None:
        metadata, columns = table.metadata(), json.loads(table.schema().to_json())
        properties = dict(metadata.configuration)
        ref = TableRef(path=path, version=table.version(), table_id=str(metadata.id), source=table_source(properties))
        return Snapshot(ref, properties, StructType.fromJson(columns))
    if spark is None:
        raise NeedsSpark
    # Asked of Delta's log itself: `DESCRIBE HISTORY` and `DESCRIBE DETAIL` are Spark jobs of a second each.
    jvm: Any = spark._jvm
    snapshot = newest_in_log(spark, path)
    if snapshot.version() < 0:
        return None
    found = snapshot.metadata()
    as_java = jvm.scala.jdk.javaapi.CollectionConverters.asJava
    properties = dict(as_java(found.configuration()))
    ref = TableRef(path=path, version=snapshot.version(), table_id=found.id(), source=table_source(properties))
    schema = StructType.fromJson(json.loads(found.schemaString()))
    return Snapshot(ref, properties, schema)


def files_with(spark: SparkSession | None, table: TableRef, key: str, values: pa.Array) -> list[str]:
    """Return the names of the files of exactly this version in which a text column has one of these values."""
    found = _without_spark(table.path, table.version)
    if found is not None:
        files = [f"{local_path(table.path)}/{name}" for name in _file_names(found)]
        rows = pyarrow.dataset.dataset(files, schema=pa.schema([(key, pa.string())]), format="parquet")
        wanted = pyarrow.dataset.field(key).isin(values)
        names = rows.to_table(columns=["__filename"], filter=wanted)["__filename"].unique()
        return sorted(name.rsplit("/", 1)[-1] for name in names.to_pylist())
    if spark is None:
        raise NeedsSpark
    wanted_rows = F.broadcast(spark.createDataFrame(pa.table({key: values})))
    keys = read_version(spark, table).select(key, F.col("_metadata.file_name").alias("file"))
    return sorted(
        row["file"] for row in keys.join(wanted_rows, on=key, how="left_semi").select("file").distinct().collect()
    )


def has_table(spark: SparkSession | None, path: str) -> bool:
    """Say whether a Delta table is at `path`.

    Raises:
        NeedsSpark: As `newest_snapshot`; so do the functions below.
    """
    return newest_snapshot(spark, path) is not None


def latest(spark: SparkSession | None, path: str) -> TableRef:
    """Return the newest version of the table, resolved once, so that later reads agree.

    Raises:
        WrongInput: No Delta table is there.
    """
    snapshot = newest_snapshot(spark, path)
    if snapshot is None:
        raise WrongInput(f"'{path}' is not a Delta table: run the flow etl first, or give another path")
    return snapshot.table


def at_version(spark: SparkSession | None, path: str, version: int | None) -> TableRef:
    """Return the asked-for version of the table, or the newest.

    Raises:
        WrongInput: No Delta table is there, or it has no such version any more.
    """
    newest = latest(spark, path)
    if version in {None, newest.version}:
        return newest
    if spark is None:
        raise NeedsSpark
    versions = [row["version"] for row in DeltaTable.forPath(spark, path).history().select("version").collect()]
    if version not in versions:
        raise WrongInput(
            f"table_version is {version}, but '{path}' has the versions {min(versions)} to {max(versions)}: "
            "choose one of them, or leave it empty for the newest"
        )
    return newest.model_copy(update={"version": version, "source": _source_then(path, version, newest.source)})


def _source_then(path: str, version: int, newest: str) -> str:
    """Return the source of a version, which may have been replaced since; of a remote table the newest one."""
    table = _without_spark(path, version)
    return newest if table is None else table_source(table.metadata().configuration)


def properties_of(table: TableRef) -> dict[str, str]:
    """Return the properties of exactly this version, read without Spark.

    Raises:
        NeedsSpark: Only Spark can read it, or the version is gone.
    """
    found = _without_spark(table.path, table.version)
    if found is None:
        raise NeedsSpark
    return dict(found.metadata().configuration)


def columns_of(spark: SparkSession | None, table: TableRef) -> list[str]:
    """Return the names of the columns of exactly this version."""
    found = _without_spark(table.path, table.version)
    if found is not None:
        return [field.name for field in found.schema().fields]
    if spark is None:
        raise NeedsSpark
    return read_version(spark, table).columns


def read_version(spark: SparkSession, table: TableRef) -> DataFrame:
    """Return the rows of exactly this version."""
    return spark.read.format("delta").option("versionAsOf", table.version).load(table.path)


def _rows_of(
    found: deltalake.DeltaTable, path: str, schema: pa.Schema, where: Mapping[str, str | int]
) -> pyarrow.dataset.Dataset:
    """Return the rows of a local table: these columns, and those of `where`."""
    files = [f"{local_path(path)}/{name}" for name in _file_names(found)]
    others = [pa.field(name, pa.array([value]).type) for name, value in where.items() if name not in schema.names]
    # Times are in the older of Parquet's two types in what Spark writes.
    layout = ParquetFileFormat(read_options=ParquetReadOptions(coerce_int96_timestamp_unit="us"))
    return pyarrow.dataset.dataset(files, schema=pa.schema([*schema, *others]), format=layout)


def _filter(where: Mapping[str, str | int]) -> pyarrow.dataset.Expression | None:
    wanted = [pyarrow.dataset.field(name) == value for name, value in where.items()]
    return reduce(and_, wanted) if wanted else None


def read_batches(
    table: TableRef, schema: pa.Schema, where: Mapping[str, str | int], num_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows as `read_columns`, at most so many at a time, read without Spark.

    Raises:
        NeedsSpark: Only Spark can read it, or the version is gone.
    """
    found = _without_spark(table.path, table.version)
    if found is None or (table.table_id and str(found.metadata().id) != table.table_id):
        raise NeedsSpark
    rows = _rows_of(found, table.path, schema, where)
    yield from rows.to_batches(
        columns=schema.names, filter=_filter(where), batch_size=num_rows, batch_readahead=1, fragment_readahead=1
    )


def read_columns(
    spark: SparkSession | None, table: TableRef, schema: pa.Schema, where: Mapping[str, str | int] | None = None
) -> pa.Table:
    """Return these columns of exactly this version, in memory: all rows, or those that have the values in `where`."""
    found, where = _without_spark(table.path, table.version), where or {}
    if found is not None:
        return _rows_of(found, table.path, schema, where).to_table(filter=_filter(where), columns=schema.names)
    if spark is None:
        raise NeedsSpark
    rows = read_version(spark, table).select(*schema.names)
    for name, value in where.items():
        rows = rows.where(F.col(name) == value)
    return rows.toArrow().cast(schema)
