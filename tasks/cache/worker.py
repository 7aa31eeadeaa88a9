"""petastorm workers that read each row group directly into the batches that it belongs to.

A column of a row group is one plain page: raw pixels are read without a decoder.
"""

import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from petastorm.arrow_reader_worker import ArrowReaderWorker
from torchvision.io import ImageReadMode, decode_jpeg

from tasks.cache.assemble import Assembly, Part, Pixels, runs
from tasks.cache.manifest import CacheDamaged
from tasks.cache.order import Integers

IOV_MAX = 1024
"""Maximum number of buffers of one `preadv` on Linux."""


MAX_HEADER_BYTES = 64
"""Upper bound of a data page's header, which has under 40 bytes without statistics."""


class PlainColumn(NamedTuple):
    """One column of one row group: a page header, then `num_values` values of `width` bytes each."""

    offset: int
    header_bytes: int
    num_values: int
    width: int

    def check_header(self, header: bytes, path: str) -> None:
        """Check that the page holds exactly the values.

        Raises:
            CacheDamaged: The header differs; the message names the file.
        """
        size = _varint(2 * self.num_values * self.width)  # zigzag
        # Thrift compact protocol, parquet.thrift PageHeader: type DATA_PAGE, uncompressed size, compressed size.
        if not header.startswith(b"\x15\x00\x15" + size + b"\x15" + size):
            raise CacheDamaged(f"{path} has a damaged page header at byte {self.offset}: build the cache again")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@lru_cache(maxsize=4096)
def plain_columns(path: str, row_bytes: int) -> tuple[dict[str, PlainColumn], ...]:
    """Return, per row group, the layout of the columns of a local file of raw contents: content, label and row.

    The result is cached for later epochs: a cache file never changes, and a rebuilt file has another name.

    Raises:
        CacheDamaged: A column does not have the layout that `tasks.cache.write` writes.
    """
    footer = pq.read_metadata(path)
    columns = {footer.schema.column(number).name: number for number in range(footer.num_columns)}
    groups = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        places = {"content": (0, row_bytes), "label": (columns["label"], 8), "row": (columns["row"], 8)}
        groups.append(
            {name: _plain(path, group.column(at), group.num_rows, width) for name, (at, width) in places.items()}
        )
    return tuple(groups)


def _plain(path: str, column: Any, num_values: int, width: int) -> PlainColumn:
    header_bytes = column.total_compressed_size - num_values * width
    if column.compression != "UNCOMPRESSED" or column.has_dictionary_page or not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise CacheDamaged(f"{path} has a column '{column.path_in_schema}' that is not one plain page: build it again")
    return PlainColumn(column.data_page_offset, header_bytes, num_values, width)


class Work(NamedTuple):
    """Batches and row format that the workers of one reader work on."""

    assembly: Assembly
    image_size: int
    row_bytes: int
    jpeg: bool
    local: bool


class PlacingWorker(ArrowReaderWorker):  # type: ignore[misc]  # petastorm has no types
    """Worker that reads the requested rows of a row group, each to its place in its batch."""

    def __init__(self, worker_id: int, publish_func: Any, args: tuple[Any, ...]) -> None:
        super().__init__(worker_id, publish_func, args[:-1])
        self._work: Work = args[-1]

    def process(self, piece_index: int, worker_predicate: None, shuffle_row_drop_partition: tuple[int, int]) -> None:
        """Read one row group.

        Raises:
            CacheDamaged: The rows that were read are not those that were written.
        """
        piece = self._split_pieces[piece_index]
        part = self._work.assembly.part(piece_index)
        if self._work.local and not self._work.jpeg:
            labels, rows = read_plain(piece.path, piece.row_group, part, self._work.row_bytes)
        else:
            with self._filesystem.open(piece.path, "rb") as handle:
                table = pq.ParquetFile(handle).read_row_group(piece.row_group, use_threads=False)
            try:
                labels, rows = self._place(table, part)
            except (RuntimeError, ValueError) as error:
                raise CacheDamaged(f"{piece.path} has a damaged image in row group {piece.row_group}") from error
        if not np.array_equal(rows[part.rows_in_group], part.rows):
            raise CacheDamaged(f"{piece.path} has other rows in row group {piece.row_group} than were written")
        self._work.assembly.set_labels(part, labels[part.rows_in_group])
        self.publish_func(piece_index)

    def _place(self, table: pa.Table, part: Part) -> tuple[Integers, Integers]:
        (contents,) = table.column(0).chunks
        wanted = part.rows_in_group.tolist()
        if self._work.jpeg:
            for row, place in zip(wanted, part.places, strict=True):
                decode_into(contents[row].as_buffer(), place, self._work.image_size)
        else:
            block = np.frombuffer(contents.buffers()[1], dtype=np.uint8).reshape(len(contents), -1)
            for row, place in zip(wanted, part.places, strict=True):
                place[:] = block[row]
        return table["label"].to_numpy(), table["row"].to_numpy()


def decode_into(content: Any, place: Pixels, side: int) -> None:
    """Decode a JPEG file of side x side pixels; torchvision's libjpeg gives PIL's pixels in two thirds of the time."""
    # A copy: torch warns about read-only memory.
    encoded = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
    image_CHW = decode_jpeg(encoded, mode=ImageReadMode.RGB)
    place.reshape(side, side, 3)[:] = image_CHW.permute(1, 2, 0).numpy()


def read_plain(path: str, row_group: int, part: Part, row_bytes: int) -> tuple[Integers, Integers]:
    """Read raw pixels or features of a local file: the kernel copies each row from the page cache to its place.

    Returns:
        Labels and row numbers of the whole row group.

    Raises:
        CacheDamaged: The file is truncated, or the header of a page differs.
    """
    columns = plain_columns(path, row_bytes)[row_group]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = columns["content"]
        content.check_header(os.pread(descriptor, content.header_bytes, content.offset), path)
        for begin, end in runs(part.rows_in_group, IOV_MAX):
            offset = content.offset + content.header_bytes + int(part.rows_in_group[begin]) * row_bytes
            places: list[Any] = part.places[begin:end]  # typeshed does not declare arrays as buffers
            if os.preadv(descriptor, places, offset) != (end - begin) * row_bytes:
                raise CacheDamaged(f"{path} ends within its row group {row_group}: build the cache again")
        return _integers(descriptor, columns["label"], path), _integers(descriptor, columns["row"], path)
    finally:
        os.close(descriptor)


def _integers(descriptor: int, column: PlainColumn, path: str) -> Integers:
    content = os.pread(descriptor, column.header_bytes + 8 * column.num_values, column.offset)
    column.check_header(content[: column.header_bytes], path)
    return np.frombuffer(content, dtype=np.int64, offset=column.header_bytes)
