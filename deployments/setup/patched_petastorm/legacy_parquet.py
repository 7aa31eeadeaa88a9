"""The parts of PyArrow's legacy Parquet API that petastorm 0.13.1 uses, which PyArrow 15 and 16 removed.

Set-up copies this module into petastorm's package, in place of `pyarrow.parquet`. It stands on fsspec and
`pyarrow.dataset`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset
from fsspec.implementations.arrow import ArrowFSWrapper, HadoopFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow.parquet import ParquetFile, filters_to_expression, read_metadata, write_metadata

__all__ = [
    "HadoopFileSystem",
    "LocalFileSystem",
    "ParquetDataset",
    "ParquetDatasetPiece",
    "ParquetFile",
    "PartitionSet",
    "read_metadata",
    "write_metadata",
]


class PartitionSet(NamedTuple):
    """The values of one partition column.

    Attributes:
        name: Name of the column.
        keys: Its values, integers or strings.
    """

    name: str
    keys: list[Any]

    @property
    def dictionary(self) -> pa.Array:
        """The values, as int64 if all are integers or their text, else as strings."""
        try:
            return pa.array([int(key) for key in self.keys], pa.int64())
        except ValueError:
            return pa.array(self.keys)


class ParquetPartitions(tuple[PartitionSet, ...]):
    """The partition columns of a dataset, from the outermost folder to the innermost."""

    __slots__ = ()

    @property
    def partition_names(self) -> set[str]:
        """Names of the partition columns."""
        return {level.name for level in self}


@dataclass
class ParquetDatasetPiece:
    """One file of a dataset, or one of its row groups.

    Attributes:
        path: The file.
        open_file_func: Function that opens a path for reading.
        row_group: Number of the row group, None for the whole file.
        partition_keys: Name and index of the value of each partition column.
    """

    path: str
    open_file_func: Callable[[str], Any] = LocalFileSystem().open
    row_group: int | None = None
    partition_keys: list[tuple[str, int]] = field(default_factory=list)

    def get_metadata(self) -> Any:
        """Return the file's footer."""
        with self.open_file_func(self.path) as file:
            return read_metadata(file)

    def read(self, columns: Any = None, partitions: ParquetPartitions = ParquetPartitions()) -> pa.Table:
        """Return the rows of the piece, with the partition columns as dictionaries.

        Args:
            columns: Names of the columns to read beside the partition columns, None for all.
            partitions: The partition columns of the dataset.
        """
        with self.open_file_func(self.path) as source, ParquetFile(source) as file:
            # In the file's order, which a set does not have.
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            table = file.read(names) if self.row_group is None else file.read_row_group(self.row_group, names)
        for (name, index), level in zip(self.partition_keys, partitions, strict=True):
            indices = pa.repeat(pa.scalar(index, pa.int32()), len(table))
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, level.dictionary))
        return table


class ParquetDataset:
    """Parquet files: those of a folder with Hive partitions, or a list of files.

    Args:
        path_or_paths: A folder, a file, or a list of files.
        filesystem: A file system of fsspec or PyArrow, or an object with their `open`, `isdir` and `isfile`; None for
            local files.
        filters: Conditions on partition columns, as `pyarrow.parquet.read_table` takes them; None for all files.

    Raises:
        OSError: A path is neither a folder nor a file.
    """

    def __init__(self, path_or_paths: Any, filesystem: Any = None, filters: Any = None, **_ignored: Any) -> None:
        if isinstance(path_or_paths, list) and len(path_or_paths) == 1:
            (path_or_paths,) = path_or_paths
        self.paths = path_or_paths
        filesystem = filesystem or LocalFileSystem()
        self.fs = filesystem if hasattr(filesystem, "open") else ArrowFSWrapper(filesystem)
        self.partitions = ParquetPartitions()
        self.metadata_path = self._common_metadata_path = None
        if isinstance(self.paths, str) and self.fs.isdir(self.paths):
            self.metadata_path, self._common_metadata_path = map(self._summary, ("_metadata", "_common_metadata"))
            self.pieces = self._find_pieces(filters)
            return
        paths = self.paths if isinstance(self.paths, list) else [self.paths]
        for path in paths:
            if not self.fs.isfile(path):
                raise OSError(f"'{path}' is neither a folder nor a file")
        self.pieces = [ParquetDatasetPiece(path, self.fs.open) for path in paths]

    def _summary(self, name: str) -> str | None:
        path = f"{self.paths.rstrip('/')}/{name}"
        return path if self.fs.isfile(path) else None

    def _find_pieces(self, filters: Any) -> list[ParquetDatasetPiece]:
        files = pyarrow.dataset.dataset(self.paths, filesystem=self.fs, format="parquet", partitioning="hive")
        keys = {one.path: pyarrow.dataset.get_partition_keys(one.partition_expression) for one in files.get_fragments()}
        self.partitions = ParquetPartitions(
            PartitionSet(name, sorted({values[name] for values in keys.values()}))
            for name in files.partitioning.schema.names  # in the order of the folders, and the files' own columns
            if all(name in values for values in keys.values())
        )
        condition = None if filters is None else filters_to_expression(filters)
        return [
            ParquetDatasetPiece(
                one.path,
                self.fs.open,
                partition_keys=[
                    (level.name, level.keys.index(keys[one.path][level.name])) for level in self.partitions
                ],
            )
            for one in files.get_fragments(condition)
        ]

    @cached_property
    def metadata(self) -> Any:
        """The footer of the file `_metadata`, None if there is none."""
        return self._footer(self.metadata_path)

    @cached_property
    def common_metadata(self) -> Any:
        """The footer of the file `_common_metadata` or else `_metadata`, None if there is neither."""
        return self._footer(self._common_metadata_path or self.metadata_path)

    def _footer(self, path: str | None) -> Any:
        if path is None:
            return None
        with self.fs.open(path) as file:
            return read_metadata(file)
