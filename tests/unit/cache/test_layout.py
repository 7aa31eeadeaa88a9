"""Where pixels lie in a file: exactly where the footer and the page header say, or it is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.cache.layout import plain_columns
from tasks.cache.manifest import CacheDamaged
from tasks.refs import CacheRef
from tasks.schema import cache_schema

PIXEL_BYTES = 16 * 16 * 3


def test_columns_lie_where_they_are_said_to(make_cache: Callable[..., CacheRef]) -> None:
    """The bytes at the offsets are what Arrow's own reader gives, of every column and row group."""
    file = next(Path(make_cache({"train": 6}).url).glob("*.parquet"))
    content = file.read_bytes()

    for number, columns in enumerate(plain_columns(str(file), PIXEL_BYTES)):
        table = pq.ParquetFile(file).read_row_group(number)
        for name, column in columns.items():
            begin = column.offset + column.header_bytes
            held = content[begin : begin + column.num_values * column.width]
            values = table["pixels" if name == "content" else name].to_pylist()
            assert held == (b"".join(values) if name == "content" else np.array(values, dtype=np.int64).tobytes())
            column.check_header(content[column.offset : begin], str(file))


@pytest.mark.parametrize("how", [{"compression": "zstd"}, {"data_page_size": 100}, {"use_dictionary": True}])
def test_file_of_another_layout_is_refused(tmp_path: Path, how: dict[str, object]) -> None:
    """Compressed, cut into pages or with a dictionary, the pixels are not one plain block."""
    table = pa.table(
        [pa.array([bytes([row]) * PIXEL_BYTES for row in range(50)], pa.binary(PIXEL_BYTES)), range(50), range(50)],
        schema=cache_schema(PIXEL_BYTES),
    )
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_batch_size": 1}
    pq.write_table(table, tmp_path / "x.parquet", **(plain | how))

    with pytest.raises(CacheDamaged, match=r"has a column '\w+' that is not one plain page"):
        plain_columns(str(tmp_path / "x.parquet"), PIXEL_BYTES)
