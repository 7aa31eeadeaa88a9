"""Rewriting of a table's files: in threads of the driver if they are small, else in a Spark job."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.object_store import file_system
from tasks.system.cores import num_cores

Mapper = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function for `mapInArrow`."""

DRIVER_BYTES = 64 << 20
"""Total size up to which the driver rewrites files itself: faster than the start of a Spark job, about 0.5 s."""


def map_files(spark: SparkSession, folder: str, files: pa.Table, mapper: Mapper, schema: str) -> list[dict[str, Any]]:
    """Return the rows that `mapper` yields for each row of `files`, in any order.

    Args:
        spark: The session.
        folder: Path or URL of the table.
        files: One row per file; the first column has its name relative to the folder.
        mapper: Called with one row at a time; in the driver, several threads call it concurrently.
        schema: Schema of the rows that it yields, as a DDL string.
    """
    if not are_small(folder, files.column(0).to_pylist()):
        frame = spark.createDataFrame(files).repartition(files.num_rows)
        return [row.asDict() for row in frame.mapInArrow(mapper, schema).collect()]  # type: ignore[arg-type]  # an iterator in, as documented
    batches = files.combine_chunks().to_batches(max_chunksize=1)
    with ThreadPoolExecutor(num_cores()) as pool:
        done = pool.map(lambda batch: [*mapper(iter([batch]))], batches)
        return [row for found in done for batch in found for row in batch.to_pylist()]


def are_small(folder: str, names: Iterable[str]) -> bool:
    """Return whether the driver should process these files of a table itself."""
    filesystem, root = file_system(folder)
    remaining = DRIVER_BYTES
    for name in names:
        remaining -= filesystem.size(f"{root}/{name}")
        if remaining < 0:
            return False
    return True
