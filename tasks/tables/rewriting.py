"""Write files of a table again: in threads of the driver where they are small, in a Spark job where they are not."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.system.cores import num_cores

Mapper = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What `mapInArrow` takes."""

DRIVER_BYTES = 64 << 20
"""Up to so many bytes of files the driver copies faster than a Spark job starts, which takes half a second."""


def map_files(spark: SparkSession, folder: str, files: pa.Table, mapper: Mapper, schema: str) -> list[dict[str, Any]]:
    """Return the rows that `mapper` yields for each row of `files`, in any order.

    Args:
        spark: The session.
        folder: Path or URL of the table.
        files: One row per file, its name below the folder in the first column.
        mapper: Called with one row at a time; in the driver, several threads call it at once.
        schema: Of what it yields.
    """
    if not _are_small(folder, files.column(0).to_pylist()):
        frame = spark.createDataFrame(files).repartition(files.num_rows)
        return [row.asDict() for row in frame.mapInArrow(mapper, schema).collect()]  # type: ignore[arg-type]  # an iterator in, as documented
    batches = files.combine_chunks().to_batches(max_chunksize=1)
    with ThreadPoolExecutor(num_cores()) as pool:
        done = pool.map(lambda batch: [*mapper(iter([batch]))], batches)
        return [row for found in done for batch in found for row in batch.to_pylist()]


def _are_small(folder: str, names: list[str]) -> bool:
    filesystem, root = fsspec.core.url_to_fs(folder)
    left = DRIVER_BYTES
    for name in names:
        left -= filesystem.size(f"{root}/{name}")
        if left < 0:
            return False
    return True
