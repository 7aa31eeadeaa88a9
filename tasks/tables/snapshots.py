"""Versions of Delta tables and their contents, read by delta-rs and Arrow if possible, else by Spark.

Spark takes seconds to start, and five for its first read of a table, most of them for compilation. Tables on a local
disk are read without it. Spark reads tables on a store, whose credentials it has, and tables to which another program
gave newer features of the protocol.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import deltalake
import pyarrow as pa
import pyarrow.dataset
from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tasks.errors import WrongInput
from tasks.paths import local_path
from tasks.refs import TableRef
from tasks.spark.file_systems import prepare_store
from tasks.spark.session import NeedsSpark
from tasks.tables.delta import newest_commit, with_nulls
from tasks.tables.delta_internals import newest_in_log
from tasks.tables.local_files import chosen_files, data_files, dataset_of, having, is_readable
from tasks.tables.parquet_rows import ParquetRows, grouped, spool_rows
from tasks.tables.properties import join_properties, table_source

STREAM_ROWS = 10_000
"""Minimum number of rows that a Spark task sends to the driver at once: about three megabytes of the ledger."""


@dataclass(frozen=True)
class Snapshot:
    """One version of a table, with its properties and columns."""

    table: TableRef
    properties: dict[str, str]
    schema: StructType


def _without_spark(path: str, version: int | None = None) -> deltalake.DeltaTable | None:
    """Open an existing table at a version or the newest; return None if only Spark can read it."""
    folder = local_path(path)
    if folder is None or "%" in str(folder):  # delta-rs decodes a percent sign once too often
        return None
    try:
        table = deltalake.DeltaTable(folder.absolute().as_uri(), version=version)
        return table if is_readable(table, data_files(table)) else None
    except deltalake.exceptions.DeltaError:
        return None  # Spark reads the table, or raises an error that explains the problem.


def _columns(table: deltalake.DeltaTable) -> StructType:
    """Return the table's columns and their types, as Spark has them."""
    return StructType.fromJson(json.loads(table.schema().to_json()))


def _properties(table: deltalake.DeltaTable) -> dict[str, str]:
    metadata = table.metadata()
    return join_properties(metadata.configuration, metadata.description)


def newest_snapshot(spark: SparkSession | None, path: str) -> Snapshot | None:
    """Return the newest version of the table, or None if `path` is not a Delta table.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
    """
    if local_path(path) is not None and newest_commit(path) is None:
        return None
    table = _without_spark(path)
    if table is not None:
        metadata, properties = table.metadata(), _properties(table)
        ref = TableRef(path=path, version=table.version(), table_id=str(metadata.id), source=table_source(properties))
        return Snapshot(ref, properties, _columns(table))
    if spark is None:
        raise NeedsSpark
    snapshot = newest_in_log(spark, path)
    if snapshot is None:
        return None
    source = table_source(snapshot.properties)
    ref = TableRef(path=path, version=snapshot.version, table_id=snapshot.table_id, source=source)
    return Snapshot(ref, snapshot.properties, snapshot.schema)


def files_containing(table: TableRef, key: str, values: pa.Array) -> list[str]:
    """Return the names of the files of this version in which a text column has one of these values.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    found = _without_spark(table.path, table.version)
    if found is None:
        raise NeedsSpark
    rows = dataset_of(table.path, data_files(found), pa.schema([(key, pa.string())]), {})
    wanted = pyarrow.dataset.field(key).isin(values)
    names = rows.to_table(columns=["__filename"], filter=wanted)["__filename"].unique()
    return sorted(name.rsplit("/", 1)[-1] for name in names.to_pylist())


def has_version(spark: SparkSession | None, table: TableRef) -> bool:
    """Return whether all rows of this version can still be read: neither log nor files were removed since then.

    Raises:
        NeedsSpark: As `newest_snapshot`.
    """
    newest = newest_snapshot(spark, table.path)
    if newest is None or newest.table.table_id != (table.table_id or newest.table.table_id):
        return False
    found = _without_spark(table.path, table.version)
    if found is not None:
        folder = local_path(table.path)
        return all(os.path.exists(f"{folder}/{file.name}") for file in data_files(found))
    if spark is None or _without_spark(table.path) is not None:
        return False  # Without Spark the newest version can be read, and this one is not in the log any more.
    try:
        files = read_version(spark, table).inputFiles()
    except AnalysisException:
        return False
    return all(map(partial(_exists, spark), files))


def _exists(spark: SparkSession, file: str) -> bool:
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
    settings = cast("Any", spark.sparkContext)._jsc.hadoopConfiguration()
    return bool(path.getFileSystem(settings).exists(path))


def has_table(spark: SparkSession | None, path: str) -> bool:
    """Return whether a Delta table exists at `path`.

    Raises:
        NeedsSpark: As `newest_snapshot`, like all functions below.
    """
    return newest_snapshot(spark, path) is not None


def latest(spark: SparkSession | None, path: str) -> TableRef:
    """Return the newest version of the table, resolved once so that later reads see the same version.

    Raises:
        WrongInput: The path is not a Delta table.
    """
    snapshot = newest_snapshot(spark, path)
    if snapshot is None:
        raise WrongInput(f"'{path}' is not a Delta table: run the flow etl first, or give another path")
    return snapshot.table


def at_version(spark: SparkSession | None, path: str, version: int | None, setting: str = "table_version") -> TableRef:
    """Return the requested version of the table, or the newest if `version` is None.

    Args:
        spark: The session, or None.
        path: Path or URL of the table.
        version: The version.
        setting: Name of its setting, for the error message.

    Raises:
        WrongInput: The path is not a Delta table, or its log or its folder no longer has the version.
    """
    newest = latest(spark, path)
    if version is None or version == newest.version:
        return newest
    if version < newest.version and (table := _without_spark(path, version)) is not None:
        _check_files(table, path, version, setting)
        return newest.model_copy(update={"version": version, "source": table_source(_properties(table))})
    if spark is None:
        raise NeedsSpark
    versions = [row["version"] for row in DeltaTable.forPath(spark, path).history().select("version").collect()]
    if version not in versions:
        raise WrongInput(
            f"{setting} is {version}, but '{path}' has the versions {min(versions)} to {max(versions)}: "
            "choose one of them, or leave it empty for the newest"
        )
    return newest.model_copy(update={"version": version})


def _check_files(table: deltalake.DeltaTable, path: str, version: int, setting: str) -> None:
    """Check that a local table still has the files of a version.

    Raises:
        WrongInput: One of them was removed.
    """
    folder = local_path(path)
    if not all(os.path.exists(f"{folder}/{file.name}") for file in data_files(table)):
        raise WrongInput(
            f"{setting} is {version}, but files of this version of '{path}' were removed, as the flow maintain does "
            "after maintain.vacuum_hours: choose a newer version, or leave it empty for the newest"
        )


def properties_of(table: TableRef) -> dict[str, str]:
    """Return the properties of this version, read without Spark.

    Raises:
        NeedsSpark: Only Spark can read the version, or it no longer exists.
    """
    found = _without_spark(table.path, table.version)
    if found is None:
        raise NeedsSpark
    return _properties(found)


def schema_of(spark: SparkSession | None, table: TableRef) -> StructType:
    """Return the columns of this version and their types."""
    found = _without_spark(table.path, table.version)
    if found is not None:
        return _columns(found)
    if spark is None:
        raise NeedsSpark
    return read_version(spark, table).schema


def read_version(spark: SparkSession, table: TableRef) -> DataFrame:
    """Return the rows of this version as a DataFrame."""
    prepare_store(spark, table.path)
    return spark.read.format("delta").option("versionAsOf", table.version).load(table.path)


def read_batches(
    table: TableRef, schema: pa.Schema, where: Mapping[str, str | int], num_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `read_columns` in batches of at most `num_rows`, read without Spark.

    Raises:
        NeedsSpark: Only Spark can read the version, or it no longer exists.
    """
    found = _without_spark(table.path, table.version)
    if found is None or (table.table_id and str(found.metadata().id) != table.table_id):
        raise NeedsSpark
    rows = dataset_of(table.path, chosen_files(data_files(found), where), schema, where)
    yield from rows.to_batches(
        columns=schema.names, filter=having(where), batch_size=num_rows, batch_readahead=1, fragment_readahead=1
    )


def version_rows(
    spark: SparkSession | None,
    table: TableRef,
    schema: pa.Schema,
    scratch: Path,
    where: Mapping[str, str | int] | None = None,
) -> ParquetRows:
    """Return the rows of `read_columns` on the local disk, for queries: ten million of them do not fit into memory.

    The rows of a local table are its own files. Those that only Spark can read are copied, one partition at a time,
    as are those with partition columns that have no value in `where`.

    Args:
        spark: The session, or None.
        table: The version.
        schema: Columns of the rows.
        scratch: Folder for a temporary copy, which exists as long as the rows.
        where: Value of a column in all rows.
    """
    found, where = _without_spark(table.path, table.version), where or {}
    if found is not None:
        return _local_rows(found, table.path, schema, scratch, where)
    if spark is None:
        raise NeedsSpark
    return spool_rows(stream_rows(_chosen_rows(spark, table, schema, where), schema), schema, scratch)


def _local_rows(
    found: deltalake.DeltaTable, path: str, schema: pa.Schema, scratch: Path, where: Mapping[str, str | int]
) -> ParquetRows:
    files = chosen_files(data_files(found), where)
    partitioned = set(found.metadata().partition_columns)
    if partitioned & set(schema.names) - set(where):
        rows = dataset_of(path, files, schema, where).to_batches(columns=schema.names, filter=having(where))
        return spool_rows(rows, schema, scratch)
    folder = os.path.abspath(str(local_path(path)))
    fixed = {name: value for name, value in where.items() if name in partitioned}
    others = {name: value for name, value in where.items() if name not in partitioned}
    return ParquetRows(tuple(f"{folder}/{file.name}" for file in files), schema, others, fixed)


def stream_rows(rows: DataFrame, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a frame with these columns in batches; `toArrow` would hold all of them on the driver."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Spark's own batches have few rows, since its settings are for images.
        for table in grouped(batches, STREAM_ROWS):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield pa.RecordBatch.from_pydict({"packed": [sink.getvalue().to_pybytes()]})

    packed = rows.mapInArrow(pack, "packed binary")  # type: ignore[arg-type]  # takes an iterator, as documented
    for row in packed.toLocalIterator():
        yield from pa.ipc.open_stream(row["packed"]).read_all().cast(schema).to_batches()


def _chosen_rows(spark: SparkSession, table: TableRef, schema: pa.Schema, where: Mapping[str, str | int]) -> DataFrame:
    rows = read_version(spark, table)
    for name, value in where.items():
        rows = rows.where(F.col(name) == value)
    # A column that an older table lacks is null, as it is where the files are read without Spark.
    lacking = [field for field in from_arrow_schema(schema) if field.name not in rows.columns and field.nullable]
    return with_nulls(rows, lacking).select(*schema.names)


def read_columns(
    spark: SparkSession | None, table: TableRef, schema: pa.Schema, where: Mapping[str, str | int] | None = None
) -> pa.Table:
    """Return these columns of this version as a table in memory: all rows, or those that have the values in `where`."""
    found, where = _without_spark(table.path, table.version), where or {}
    if found is not None:
        rows = dataset_of(table.path, chosen_files(data_files(found), where), schema, where)
        return rows.to_table(filter=having(where), columns=schema.names)
    if spark is None:
        raise NeedsSpark
    return _chosen_rows(spark, table, schema, where).toArrow().cast(schema)
