"""Where the bytes of a cache file lie: columns that are one plain page a row group, to be read without a decoder."""

from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from tasks.cache.manifest import CacheDamaged

MAX_HEADER_BYTES = 64
"""A data page's header without statistics is under 40 bytes."""


class PlainColumn(NamedTuple):
    """One column of one row group: a page header, then `num_values` values of `width` bytes, and nothing else."""

    offset: int
    header_bytes: int
    num_values: int
    width: int

    def check_header(self, header: bytes, path: str) -> None:
        """Refuse a page that is not exactly the values.

        Raises:
            CacheDamaged: Names the file.
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
    """Return by row group where the columns of a local file of raw contents lie: content, label and row.

    Remembered, since each epoch asks again: a cache file never changes, and one built anew has another name.

    Raises:
        CacheDamaged: A column is not laid out as `tasks.cache.write` does.
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
