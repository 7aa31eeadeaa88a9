"""Rows in local Parquet files, which a query reads only as far as it needs them, and temporary files of such rows."""

import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

GROUP_ROWS = 100_000
"""Minimum number of rows of a row group of a temporary file; Spark's batches have a hundred."""


@dataclass(frozen=True)
class ParquetRows:
    """Rows in local Parquet files.

    Attributes:
        files: Paths of the files; a column that a file lacks is null.
        schema: Columns of the rows, of which the files may have more.
        where: Value of a column in all rows; other rows of the files do not count.
        fixed: Value of a column in all rows of the files, which lack the column.
    """

    files: tuple[str, ...]
    schema: pa.Schema
    where: Mapping[str, str | int] = field(default_factory=dict)
    fixed: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class SpooledRows(ParquetRows):
    """Rows in a temporary file, which have been counted."""

    num_rows: int = 0

    def table(self) -> pa.Table:
        """Return the rows as a table in memory."""
        return pq.read_table(self.files[0]).cast(self.schema)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows with all columns, or with some."""
        with pq.ParquetFile(self.files[0]) as file:
            yield from file.iter_batches(columns=columns)

    def counts(self, column: str) -> Counter[Any]:
        """Return the number of rows of each value of a column in order of its first occurrence, also of None."""
        found: Counter[Any] = Counter()
        for batch in self.batches([column]):
            for value, number in zip(*pc.value_counts(batch.column(0)).flatten(), strict=True):
                found[value.as_py()] += number.as_py()
        return found


def grouped(batches: Iterable[pa.RecordBatch], least: int) -> Iterator[pa.Table]:
    """Yield tables of at least so many rows, but for the last; none for batches without rows."""
    held: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in batches:
        held.append(batch)
        num_rows += batch.num_rows
        if num_rows >= least:
            yield pa.Table.from_batches(held).combine_chunks()
            held, num_rows = [], 0
    if num_rows:
        yield pa.Table.from_batches(held).combine_chunks()


def spool_rows(batches: Iterable[pa.RecordBatch], schema: pa.Schema, folder: Path | None = None) -> SpooledRows:
    """Write rows to a temporary file without a name, whose disk space is freed with the result, also after a kill.

    Args:
        batches: The rows, with the columns of `schema`.
        schema: Their columns.
        folder: Folder on the disk to use; None for the system's folder of temporary files.

    Raises:
        OSError: The disk is full.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    file, num_rows = tempfile.TemporaryFile(dir=folder), 0  # noqa: SIM115  # closed with the rows
    try:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in grouped(batches, GROUP_ROWS):
                writer.write_table(rows)
                num_rows += rows.num_rows
        file.flush()
    except BaseException:
        with suppress(OSError):  # Its buffer may not fit on a full disk.
            file.close()
        raise
    rows = SpooledRows((f"/proc/self/fd/{file.fileno()}",), schema, num_rows=num_rows)
    weakref.finalize(rows, file.close)
    return rows
