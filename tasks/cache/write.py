"""Writing of cache files in a Spark task: decoding, exact row groups, padding of the last group, digest."""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyspark import Accumulator

from tasks.cache.manifest import CacheFile
from tasks.config.cache import CacheConfig
from tasks.model_package.decode import decode_pixels, encode_jpeg
from tasks.object_store import file_system
from tasks.schema import CACHE_PART_ARROW, cache_schema
from tasks.spark.worker_log import EndedParts, WorkerCount, log_from_worker

PADDING = -1
"""Label and row number of a padding row."""


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
        self.split = split
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
        """Pad the last group, close the file, and return its entry in the manifest."""
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
        """Close an incomplete file without a footer, so that its disk space is freed once it is removed."""
        self._file.abandon()
        # Otherwise it would write a footer when it is garbage-collected.
        self._writer.close()


class CacheFileWriter(RowFileWriter):
    """Writer of the images of one cache file in the format of the cache."""

    def __init__(self, url: str, split: str, number: int, cache_config: CacheConfig, rows_per_group: int) -> None:
        schema = cache_schema(cache_config.pixel_bytes if cache_config.format == "uint8" else None)
        super().__init__(url, split, number, schema, rows_per_group)
        self._cache = cache_config

    def add(self, pixels: npt.NDArray[np.uint8], label: int, row: int) -> None:
        """Append one image, uint8 HWC."""
        self.add_content(self._encode(pixels), label, row)

    def _encode(self, pixels: npt.NDArray[np.uint8]) -> bytes:
        if self._cache.format == "uint8":
            return pixels.tobytes()
        # Chroma subsampling as in nearly every photo that is read.
        return encode_jpeg(Image.fromarray(pixels), self._cache.jpeg_quality, "4:2:0")


def _part(writer: CacheFileWriter) -> dict[str, Any]:
    """Close the file and return its row of CACHE_PART_ARROW."""
    return {"split": writer.split} | writer.close().model_dump()


def make_writer(
    url: str,
    cache_config: CacheConfig,
    rows_per_group: Mapping[str, int],
    rows_per_file: Mapping[str, int],
    ended: Accumulator[EndedParts] | None = None,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for `mapInArrow`.

    It takes batches of (split, file, label_index, content), sorted by split and row, with all rows of a file in one
    task. It yields one row of CACHE_PART_ARROW per file, and adds each task that ends to `ended`.
    """
    driver = os.getpid()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = WorkerCount("cache", driver, ended)
        writer: CacheFileWriter | None = None
        current: tuple[str, int] | None = None
        row = 0
        parts: list[dict[str, Any]] = []
        for batch in batches:
            for image in batch.to_pylist():
                place = (image["split"], image["file"])
                if writer is None or place != current:
                    if writer is not None:
                        parts.append(_part(writer))
                    writer = CacheFileWriter(url, *place, cache_config, rows_per_group[place[0]])
                    current, row = place, image["file"] * rows_per_file[image["split"]]
                pixels = decode_pixels(image["content"], cache_config.image_size)
                writer.add(pixels, image["label_index"], row)
                row += 1
                count.add(1)
        if writer is not None:
            parts.append(_part(writer))
        count.close()
        if parts:
            log_from_worker(f"wrote {len(parts)} cache files, {sum(part['rows'] for part in parts)} images")
            yield pa.RecordBatch.from_pylist(parts, schema=CACHE_PART_ARROW)

    return write
