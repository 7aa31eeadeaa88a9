"""Data files of local Delta tables, read by Arrow: a file lacks the partition columns, whose values are in the log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset
from pyarrow.dataset import FileSystemDataset, ParquetFileFormat, ParquetReadOptions
from pyarrow.fs import LocalFileSystem

from tasks.paths import local_path


@dataclass(frozen=True)
class DataFile:
    """A data file of a table.

    Attributes:
        name: Its name relative to the table's folder, or an absolute path in a shallow clone.
        partition: Value of each partition column in all of its rows.
    """

    name: str
    partition: Mapping[str, Any] = field(default_factory=dict)


def data_files(table: deltalake.DeltaTable) -> list[DataFile]:
    """Return the data files of a version."""
    added = pa.table(table.get_add_actions())
    names = added["path"].to_pylist()
    partitions = added["partition"].to_pylist() if "partition" in added.schema.names else [{}] * len(names)
    return [DataFile(name, partition or {}) for name, partition in zip(names, partitions, strict=True)]


def is_readable(table: deltalake.DeltaTable, files: list[DataFile]) -> bool:
    """Return whether Arrow can read a version by the names of its files, and the texts and integers of its partitions.

    Args:
        table: The version.
        files: Its data files.
    """
    if table.protocol().min_reader_version != 1 or any(":" in file.name or file.name.startswith("/") for file in files):
        return False
    # The directory of such a value has a percent sign in its name, which readers decode once too often.
    return all(
        isinstance(value, str | int) and "%" not in file.name for file in files for value in file.partition.values()
    )


def chosen_files(files: list[DataFile], where: Mapping[str, str | int]) -> list[DataFile]:
    """Return the files that may have rows with the values in `where`, by their partitions."""
    return [
        file for file in files if all(where.get(name, value) == value for name, value in file.partition.items())
    ]  # fmt: skip


def dataset_of(
    path: str, files: list[DataFile], schema: pa.Schema, where: Mapping[str, str | int]
) -> pyarrow.dataset.Dataset:
    """Return a dataset of files of a local table with the columns of `schema` and of `where`.

    Args:
        path: Path of the table.
        files: The files.
        schema: Columns; those that a file lacks are null.
        where: Value of a column in the wanted rows.
    """
    others = [pa.field(name, pa.array([value]).type) for name, value in where.items() if name not in schema.names]
    folder = local_path(path)
    return FileSystemDataset.from_paths(
        [f"{folder}/{file.name}" for file in files],
        schema=pa.schema([*schema, *others]),
        # Spark writes timestamps as INT96, the older of Parquet's two types.
        format=ParquetFileFormat(read_options=ParquetReadOptions(coerce_int96_timestamp_unit="us")),
        filesystem=LocalFileSystem(),
        partitions=[having(file.partition) for file in files],
    )


def having(values: Mapping[str, str | int]) -> pyarrow.dataset.Expression:
    """Return the condition that columns have these values; it is true without values."""
    wanted = [pyarrow.dataset.field(name) == value for name, value in values.items()]
    return reduce(and_, wanted) if wanted else pyarrow.dataset.scalar(True)
