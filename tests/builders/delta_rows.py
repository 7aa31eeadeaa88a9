"""Rows of Delta tables, read without Spark and without this project's code."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import deltalake
import pyarrow as pa
import pyarrow.dataset
from pyspark.sql import SparkSession


def delta_rows(table: deltalake.DeltaTable, *columns: str) -> pa.Table:
    """Return these columns of a table, by default all."""
    return table.to_pyarrow_table(columns=list(columns) or None)


def data_files(path: str, version: int | None = None) -> list[Path]:
    """Return the data files of a table on a disk, at a version or the newest."""
    return _files_of(path, deltalake.DeltaTable(path, version=version))


def _files_of(path: str, table: deltalake.DeltaTable) -> list[Path]:
    return [Path(path, unquote(name)) for name in pa.table(table.get_add_actions())["path"].to_pylist()]


def local_rows(path: str, *columns: str, version: int | None = None) -> pa.Table:
    """Return these columns of a table on a disk, by default all, in a folder of any name; no columns without rows."""
    table = deltalake.DeltaTable(path, version=version)
    files = [str(file) for file in _files_of(path, table)]
    if not files:
        return pa.table({})
    schema = pa.schema(table.schema().to_arrow())
    # Delta writes partition columns into its files, too: their type is not to be guessed from a folder's name.
    partitions = pa.schema([schema.field(name) for name in table.metadata().partition_columns])
    partitioning = pyarrow.dataset.partitioning(partitions, flavor="hive")
    return pyarrow.dataset.dataset(files, partitioning=partitioning).to_table(list(columns) or None)


def newest_rows(spark: SparkSession, path: str, *columns: str) -> list[dict[str, Any]]:
    """Return these columns of a table's newest rows; Spark, at a second of CPU time, reads what delta-rs cannot.

    These are tables on a store, with deletion vectors, and in a folder with a percent sign.
    """
    if (
        "://" in path
        or "%" in path
        or "deletionVectors" in (deltalake.DeltaTable(path).protocol().reader_features or ())
    ):
        return spark.read.format("delta").load(path).select(*columns).toArrow().to_pylist()
    return local_rows(path, *columns).to_pylist()
