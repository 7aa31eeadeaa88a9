"""What a Spark task does to write cache files: decode, group exactly, pad the last group, digest."""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyspark import Accumulator

from tasks.cache.manifest import CacheFile
from tasks.config.cache import CacheConfig
from tasks.decode import decode_pixels, encode_jpeg
from tasks.schema import CACHE_PART_ARROW, cache_schema
from tasks.spark.progress import EndedParts
from tasks.spark.worker_log import WorkerCount, say

PADDING = -1
"""Label and row number of a row that is no image."""


class _DigestingFile:
    """A binary file that takes the sha256 of what is written through it, in order."""

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
        """Close the file as it is; what is written from now on goes nowhere."""
        self._abandoned = True
        with suppress(OSError):  # Of a full disk, on which what was buffered has no place either.
            self._handle.close()


class RowFileWriter:
    """Writes one Parquet file of row groups of exactly `rows_per_group` rows: contents, labels, row numbers."""

    def __init__(self, url: str, split: str, number: int, schema: pa.Schema, rows_per_group: int) -> None:
        # The name is this attempt's own: a retried or speculative task never writes into another's file, and what
        # no manifest names is no part of the cache.
        self.name = f"{split}-{number:05d}-{uuid.uuid4().hex[:8]}.parquet"
        self.split = split
        self._rows_per_group = rows_per_group
        self._schema = schema
        filesystem, root = fsspec.core.url_to_fs(url)
        self._file = _DigestingFile(filesystem.open(f"{root}/{self.name}", "wb"))
        # No codec or dictionary earns its time on pixels, and no reader asks for statistics. A row group's column is
        # one page: raw pixels then lie in the file as they lie in memory.
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            self._schema,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            data_page_size=1 << 30,
            write_batch_size=1 << 20,
        )
        self._contents: list[bytes] = []
        self._labels: list[int] = []
        self._rows: list[int] = []
        self._num_rows = 0
        self._num_groups = 0

    def add_content(self, content: bytes, label: int, row: int) -> None:
        """Append one row."""
        self._contents.append(content)
        self._labels.append(label)
        self._rows.append(row)
        self._num_rows += 1
        if len(self._rows) == self._rows_per_group:
            self._write_group()

    def _write_group(self) -> None:
        columns = [self._contents, self._labels, self._rows]
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._rows_per_group)
        self._num_groups += 1
        self._contents, self._labels, self._rows = [], [], []

    def close(self) -> CacheFile:
        """Pad the last group, close the file, and return what the manifest says of it."""
        if self._rows:
            missing = self._rows_per_group - len(self._rows)
            kind = self._schema.field(0).type
            self._contents += [bytes(kind.byte_width) if pa.types.is_fixed_size_binary(kind) else b""] * missing
            self._labels += [PADDING] * missing
            self._rows += [PADDING] * missing
            self._write_group()
        self._writer.close()
        self._file.close()
        return CacheFile(
            name=self.name,
            rows=self._num_rows,
            row_groups=self._num_groups,
            bytes=self._file.bytes,
            sha256=self._file.sha256.hexdigest(),
        )

    def abandon(self) -> None:
        """Let go of a file that will never be whole, and of its place on the disk once it is removed."""
        self._file.abandon()
        # It would write a footer when Python collects it.
        self._writer.close()


class CacheFileWriter(RowFileWriter):
    """Writes the images of one cache file in the cache's format."""

    def __init__(self, url: str, split: str, number: int, cache: CacheConfig, rows_per_group: int) -> None:
        schema = cache_schema(cache.pixel_bytes if cache.format == "uint8" else None)
        super().__init__(url, split, number, schema, rows_per_group)
        self._cache = cache

    def add(self, pixels: npt.NDArray[np.uint8], label: int, row: int) -> None:
        """Append one image, uint8 HWC."""
        self.add_content(self._encode(pixels), label, row)

    def _encode(self, pixels: npt.NDArray[np.uint8]) -> bytes:
        if self._cache.format == "uint8":
            return pixels.tobytes()
        # Chroma is halved, as in nearly every photo that comes in.
        return encode_jpeg(Image.fromarray(pixels), self._cache.jpeg_quality, "4:2:0")


def _part(writer: CacheFileWriter) -> dict[str, Any]:
    """Close the file, and return its row of CACHE_PART_ARROW."""
    return {"split": writer.split} | writer.close().model_dump()


def make_writer(
    url: str,
    cache: CacheConfig,
    rows_per_group: Mapping[str, int],
    ended: Accumulator[EndedParts] | None = None,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow`.

    In go batches of (split, file, row, label_index, content) sorted by split and row, a file's rows all in one task;
    out comes one row of CACHE_PART_ARROW a file written. `ended` is told of each task that ends.
    """
    driver = os.getpid()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = WorkerCount("cache", driver, ended)
        writer: CacheFileWriter | None = None
        current: tuple[str, int] | None = None
        parts: list[dict[str, Any]] = []
        for batch in batches:
            for image in batch.to_pylist():
                place = (image["split"], image["file"])
                if writer is None or place != current:
                    if writer is not None:
                        parts.append(_part(writer))
                    writer = CacheFileWriter(url, *place, cache, rows_per_group[place[0]])
                    current = place
                pixels = decode_pixels(image["content"], cache.image_size)
                writer.add(pixels, image["label_index"], image["row"])
                count.add(1)
        if writer is not None:
            parts.append(_part(writer))
        count.close()
        if parts:
            say(f"wrote {len(parts)} cache files, {sum(part['rows'] for part in parts)} images")
            yield pa.RecordBatch.from_pylist(parts, schema=CACHE_PART_ARROW)

    return write
