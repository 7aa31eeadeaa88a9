"""Versions of Delta tables and their contents, read by delta-rs and Arrow if possible, else by Spark.

Spark takes seconds to start, and five for its first read of a table, most of them for compilation. Tables on a local
disk are read without it. Spark reads tables on a store, whose credentials it has, and tables to which another program
gave newer features of the protocol.
"""

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from operator import and_
from pathlib import Path
from typing import Any, cast

import deltalake
import pyarrow as pa
import pyarrow.dataset
from delta.tables import DeltaTable
from pyarrow.dataset import FileSystemDataset, ParquetFileFormat, ParquetReadOptions
from pyarrow.fs import LocalFileSystem
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tasks.errors import WrongInput
from tasks.paths import local_path
from tasks.refs import TableRef
from tasks.spark.file_systems import prepare_store
from tasks.spark.gateway import connected_jvm
from tasks.spark.session import NeedsSpark
from tasks.tables.chosen import tables_beside
from tasks.tables.delta import newest_commit, with_nulls
from tasks.tables.delta_internals import Snapshot, newest_in_log
from tasks.tables.parquet_rows import ParquetRows, grouped, spool_rows
from tasks.tables.properties import join_properties, table_source

STREAM_ROWS = 10_000
"""Minimum number of rows that a Spark task sends to the driver at once: about three megabytes of the ledger."""


def data_files(
    table: deltalake.DeltaTable, where: Mapping[str, str | int] | None = None
) -> dict[str, Mapping[str, Any]]:
    """Return the data files of a version that may have rows with the values in `where`, by their partitions.

    Args:
        table: The version.
        where: Value of a column in the rows.

    Returns:
        The value of each partition column in all rows of a file, by the file's name relative to the table's folder, or
        its absolute path in a shallow clone. The file itself lacks these columns.
    """
    added = pa.table(table.get_add_actions())
    names = added["path"].to_pylist()
    partitions = added["partition"].to_pylist() if "partition" in added.schema.names else [None] * len(names)
    return {
        name: partition or {}
        for name, partition in zip(names, partitions, strict=True)
        if all((partition or {}).get(key, value) == value for key, value in (where or {}).items())
    }


def _is_readable(table: deltalake.DeltaTable) -> bool:
    """Return whether Arrow can read a version by the names of its files and the values of its partitions."""
    files = data_files(table)
    if table.protocol().min_reader_version != 1 or any(":" in name or name.startswith("/") for name in files):
        return False
    # The directory of such a value has a percent sign in its name, which readers decode once too often.
    return all(
        isinstance(value, str | int) and "%" not in name for name, values in files.items() for value in values.values()
    )


def _has_files(table: deltalake.DeltaTable, path: str) -> bool:
    """Return whether the files of a version are still in the folder of a local table."""
    folder = local_path(path)
    return all(os.path.exists(f"{folder}/{name}") for name in data_files(table))


def _dataset(
    table: deltalake.DeltaTable, path: str, schema: pa.Schema, where: Mapping[str, str | int]
) -> pyarrow.dataset.Dataset:
    """Return the files of a local table that may have rows with the values in `where`.

    Args:
        table: The version.
        path: Path of the table.
        schema: Columns of the dataset, with those of `where`; those that a file lacks are null.
        where: Value of a column in the rows.
    """
    others = [pa.field(name, pa.array([value]).type) for name, value in where.items() if name not in schema.names]
    folder, files = local_path(path), data_files(table, where)
    return FileSystemDataset.from_paths(
        [f"{folder}/{name}" for name in files],
        schema=pa.schema([*schema, *others]),
        # Spark writes timestamps as INT96, the older of Parquet's two types.
        format=ParquetFileFormat(read_options=ParquetReadOptions(coerce_int96_timestamp_unit="us")),
        filesystem=LocalFileSystem(),
        partitions=[_having(values) for values in files.values()],
    )


def _having(values: Mapping[str, str | int]) -> pyarrow.dataset.Expression:
    """Return the condition that columns have these values; it is true without values."""
    wanted = [pyarrow.dataset.field(name) == value for name, value in values.items()]
    return reduce(and_, wanted) if wanted else pyarrow.dataset.scalar(True)


def _without_spark(path: str, version: int | None = None) -> deltalake.DeltaTable | None:
    """Open an existing table at a version or the newest; return None if only Spark can read it."""
    folder = local_path(path)
    if folder is None or "%" in str(folder):  # delta-rs decodes a percent sign once too often
        return None
    try:
        table = deltalake.DeltaTable(folder.absolute().as_uri(), version=version)
        return table if _is_readable(table) else None
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
    return newest_in_log(spark, path)


def files_containing(table: TableRef, key: str, values: pa.Array) -> list[str]:
    """Return the names of the files of this version in which a text column has one of these values.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    found = _without_spark(table.path, table.version)
    if found is None:
        raise NeedsSpark
    rows = _dataset(found, table.path, pa.schema([(key, pa.string())]), {})
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
        return _has_files(found, table.path)
    if spark is None or _without_spark(table.path) is not None:
        return False  # Without Spark the newest version can be read, and this one is not in the log any more.
    try:
        files = read_version(spark, table).inputFiles()
    except AnalysisException:
        return False
    return all(map(partial(_exists, spark), files))


def _exists(spark: SparkSession, file: str) -> bool:
    jvm = connected_jvm()
    path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
    settings = cast("Any", spark.sparkContext)._jsc.hadoopConfiguration()
    return bool(path.getFileSystem(settings).exists(path))


def latest(spark: SparkSession | None, path: str) -> TableRef:
    """Return the newest version of the table, resolved once so that later reads see the same version.

    Raises:
        NeedsSpark: As `newest_snapshot`, like all functions below.
        WrongInput: The path is not a Delta table.
    """
    snapshot = newest_snapshot(spark, path)
    if snapshot is None:
        way_out = tables_beside(path) or "run the flow etl with your source first, or give another path"
        raise WrongInput(f"'{path}' is not a Delta table", way_out=way_out)
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
        if not _has_files(table, path):
            raise WrongInput(
                f"{setting} is {version}, but files of this version of '{path}' were removed, as the flow maintain "
                "does after maintain.vacuum_hours",
                setting=setting,
                way_out="choose a newer version, or leave it empty for the newest",
            )
        return newest.model_copy(update={"version": version, "source": table_source(_properties(table))})
    if spark is None:
        raise NeedsSpark
    versions = [row["version"] for row in DeltaTable.forPath(spark, path).history().select("version").collect()]
    if version not in versions:
        raise WrongInput(
            f"{setting} is {version}, but '{path}' has the versions {min(versions)} to {max(versions)}",
            setting=setting,
            way_out="choose one of them, or leave it empty for the newest",
        )
    return newest.model_copy(update={"version": version})


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
    return read_version(spark, table).schema


def read_version(spark: SparkSession | None, table: TableRef) -> DataFrame:
    """Return the rows of this version as a DataFrame; raise NeedsSpark without a session."""
    if spark is None:
        raise NeedsSpark
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
    rows = _dataset(found, table.path, schema, where)
    yield from rows.to_batches(
        columns=schema.names, filter=_having(where), batch_size=num_rows, batch_readahead=1, fragment_readahead=1
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
    if found is None:
        return spool_rows(stream_rows(_chosen_rows(spark, table, schema, where), schema), schema, scratch)
    partitioned = set(found.metadata().partition_columns)
    if partitioned & set(schema.names) - set(where):
        rows = _dataset(found, table.path, schema, where).to_batches(columns=schema.names, filter=_having(where))
        return spool_rows(rows, schema, scratch)
    folder = os.path.abspath(str(local_path(table.path)))
    fixed = {name: value for name, value in where.items() if name in partitioned}
    others = {name: value for name, value in where.items() if name not in partitioned}
    return ParquetRows(tuple(f"{folder}/{name}" for name in data_files(found, where)), schema, others, fixed)


def stream_rows(rows: DataFrame, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a frame with these columns in batches; `toArrow` would hold all of them on the driver."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Spark's own batches have few rows, since its settings are for images.
        for table in grouped(batches, STREAM_ROWS):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield pa.RecordBatch.from_pydict({"packed": [sink.getvalue().to_pybytes()]})

    packed = rows.mapInArrow(pack, "packed binary")
    for row in packed.toLocalIterator():
        yield from pa.ipc.open_stream(row["packed"]).read_all().cast(schema).to_batches()


def _chosen_rows(
    spark: SparkSession | None, table: TableRef, schema: pa.Schema, where: Mapping[str, str | int]
) -> DataFrame:
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
        rows = _dataset(found, table.path, schema, where)
        return rows.to_table(filter=_having(where), columns=schema.names)
    return _chosen_rows(spark, table, schema, where).toArrow().cast(schema)
