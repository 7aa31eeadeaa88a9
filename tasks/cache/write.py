"""Files of a cache: their sizes, exact row groups, padding of the last group, digest, and the check of the disk."""

import hashlib
import shutil
import uuid
from contextlib import suppress
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.cache.manifest import CacheFile
from tasks.config.cache import CacheConfig
from tasks.errors import WrongInput
from tasks.object_store import file_system
from tasks.system.disk import existing_folder

FILE_BYTES = 64 << 20
"""Size of one cache file, small enough for many tasks to write and many ranks to read in parallel."""

FEATURE_GROUP_BYTES = 4 << 20
"""Size of a row group of features."""

MIN_ROW_GROUPS = 64
"""Minimum number of row groups of a split with as many rows, for shuffling and for as many ranks."""

JPEG_SHARE = 0.25
"""Size of a JPEG image relative to its pixels, for the estimate of the disk space: photos take 0.1, noisy ones more."""


def rows_in_group(rows: int, row_bytes: int, group_bytes: int) -> int:
    """Return the number of rows per row group of a split: bounded by its size, and few enough for MIN_ROW_GROUPS."""
    return max(1, min(group_bytes // row_bytes, rows // MIN_ROW_GROUPS))


def rows_per_group(rows: int, cache_config: CacheConfig) -> int:
    """Return the number of images per row group of a split."""
    return rows_in_group(rows, cache_config.pixel_bytes, cache_config.row_group_megabytes << 20)


def cache_bytes(rows: int, cache_config: CacheConfig) -> int:
    """Return an estimate of the bytes of the cache of `rows` images, including padding."""
    image_bytes = cache_config.pixel_bytes * (1 if cache_config.format == "uint8" else JPEG_SHARE)
    return int(rows * image_bytes * (1 + 1 / MIN_ROW_GROUPS)) + (1 << 20)


def check_disk(url: str, needed: int, smaller: str = "lower cache.image_size") -> None:
    """Check that the disk has room for a cache.

    Args:
        url: Folder or URL of the cache; the folder need not exist.
        needed: Size of the cache in bytes.
        smaller: The setting to change for a smaller cache, as it is named in the error message.

    Raises:
        WrongInput: It has not; the message gives the space needed and the space that is free.
    """
    folder = existing_folder(url)
    if folder is None:
        return
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WrongInput(
            f"the cache in '{url}' needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free",
            setting="storage.cache",
            way_out=f"make room, {smaller}, or set storage.cache to another disk",
        )


def rows_per_file(group_rows: int, cache_config: CacheConfig) -> int:
    """Return the number of images per file, in row groups of `group_rows` images."""
    return max(1, FILE_BYTES // (group_rows * cache_config.pixel_bytes)) * group_rows


PADDING = -1
"""Label and row number of a padding row."""


def cache_schema(row_bytes: int | None, content: Literal["pixels", "features"] = "pixels") -> pa.Schema:
    """Return the schema of a cache file; padding rows have label -1 and row -1.

    No column is nullable and raw contents have a fixed width, so that a column is a plain block of bytes in the file.

    Args:
        row_bytes: Size of one image's uint8 HWC pixels or float32 features, in bytes; None for JPEG files.
        content: Name and contents of the first column.
    """
    kind = pa.binary() if row_bytes is None else pa.binary(row_bytes)
    columns = [(content, kind), ("label", pa.int64()), ("row", pa.int64())]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


class _DigestingFile:
    """A binary file that computes the SHA-256 of the bytes written to it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.closed = False
        self._abandoned = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._abandoned:
            return view.nbytes
        self.sha256.update(view)
        self.bytes += view.nbytes
        self._handle.write(view)
        return view.nbytes

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._handle.flush()

    def close(self) -> None:
        self.closed = True
        self._handle.close()

    def abandon(self) -> None:
        """Close the file as it is; later writes are discarded."""
        self._abandoned = True
        with suppress(OSError):  # The buffered bytes may not fit on a full disk.
            self._handle.close()


class RowFileWriter:
    """Writer of one Parquet file with row groups of exactly `rows_per_group` rows: contents, labels, row numbers."""

    def __init__(self, url: str, split: str, number: int, schema: pa.Schema, rows_per_group: int) -> None:
        # The name is unique per attempt: a retried or speculative task never writes to the file of another attempt.
        # Files that no manifest names do not belong to the cache.
        self.name = f"{split}-{number:05d}-{uuid.uuid4().hex[:8]}.parquet"
        self._rows_per_group = rows_per_group
        self._schema = schema
        filesystem, root = file_system(url)
        self._file = _DigestingFile(filesystem.open(f"{root}/{self.name}", "wb"))
        # Compression and dictionaries do not pay off on pixels, and no reader uses statistics. A column of a row group
        # is one page, so that raw pixels have the same layout in the file as in memory.
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            self._schema,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            data_page_size=1 << 30,
            write_batch_size=1 << 20,
        )
        self._pending: list[tuple[bytes, int, int]] = []
        """Content, label and row number of the rows of the next group."""
        self._num_rows = 0

    def add(self, content: bytes, label: int, row: int) -> None:
        """Append one row."""
        self._pending.append((content, label, row))
        self._num_rows += 1
        if len(self._pending) == self._rows_per_group:
            self._write_group()

    def _write_group(self) -> None:
        columns = zip(*self._pending, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._rows_per_group)
        self._pending = []

    def close(self) -> CacheFile:
        """Pad the last group, close the file, and return its entry in the manifest."""
        if self._pending:
            missing = self._rows_per_group - len(self._pending)
            kind = self._schema.field(0).type
            content = bytes(kind.byte_width) if pa.types.is_fixed_size_binary(kind) else b""
            self._pending += [(content, PADDING, PADDING)] * missing
            self._write_group()
        self._writer.close()
        self._file.close()
        return CacheFile(
            name=self.name,
            rows=self._num_rows,
            row_groups=-(-self._num_rows // self._rows_per_group),
            bytes=self._file.bytes,
            sha256=self._file.sha256.hexdigest(),
        )

    def abandon(self) -> None:
        """Close an incomplete file without a footer, so that its disk space is freed once it is removed."""
        self._file.abandon()
        # Otherwise it would write a footer when it is garbage-collected.
        self._writer.close()
