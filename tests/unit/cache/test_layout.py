"""Byte layout of cache files: offsets from footer and page headers, and other layouts refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.cache.manifest import CacheDamaged
from tasks.cache.worker import plain_columns
from tasks.cache.write import cache_schema
from tasks.refs import CacheRef

PIXEL_BYTES = 16 * 16 * 3


def test_offsets_of_columns_are_correct(make_cache: Callable[..., CacheRef]) -> None:
    """For every column and row group, the bytes at the offset equal the values that Arrow reads."""
    file = next(Path(make_cache({"train": 6}).url).glob("*.parquet"))
    content = file.read_bytes()

    for number, columns in enumerate(plain_columns(str(file), PIXEL_BYTES)):
        table = pq.ParquetFile(file).read_row_group(number)
        for name, column in columns.items():
            begin = column.offset + column.header_bytes
            found = content[begin : begin + column.num_values * column.width]
            values = table["pixels" if name == "content" else name].to_pylist()
            assert found == (b"".join(values) if name == "content" else np.array(values, dtype=np.int64).tobytes())
            column.check_header(content[column.offset : begin], str(file))


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"data_page_size": 100}, {"use_dictionary": True}])
def test_file_of_another_layout_is_refused(tmp_path: Path, options: dict[str, object]) -> None:
    """A file with compression, several pages per column or a dictionary is refused."""
    table = pa.table(
        [pa.array([bytes([row]) * PIXEL_BYTES for row in range(50)], pa.binary(PIXEL_BYTES)), range(50), range(50)],
        schema=cache_schema(PIXEL_BYTES),
    )
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_batch_size": 1}
    pq.write_table(table, tmp_path / "x.parquet", **(plain | options))

    with pytest.raises(CacheDamaged, match=r"has a column '\w+' that is not one plain page"):
        plain_columns(str(tmp_path / "x.parquet"), PIXEL_BYTES)
