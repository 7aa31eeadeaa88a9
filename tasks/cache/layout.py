"""Byte layout of a cache file: one plain page per column and row group, read without a decoder."""

from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from tasks.cache.manifest import CacheDamaged

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
