"""The plan of a cache: the images of each file, from sorted keys, so that images are shuffled once."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.refs import TableRef
from tasks.schema import IMAGES_ARROW
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.relations import Relations

KEYS_ARROW = pa.schema([IMAGES_ARROW.field(name) for name in ("sha256", "split")])

RANGES_ARROW = pa.schema(
    [("split", pa.string()), ("prefix", pa.string()), ("before", pa.int32()), ("within", pa.list_(pa.string()))]
)
"""Files of the images whose sha256 has a prefix: the number of files that begin before it, and the starts within it."""

FileStarts = dict[str, list[str]]
"""First sha256 of each cache file after the first, in ascending order, by split."""


def plan_files(
    spark: SparkSession | None, table: TableRef, rows_per_file: Mapping[str, int], storage: Storage
) -> FileStarts:
    """Return the first sha256 of each cache file after the first, by split.

    Images are sorted by sha256, an order that is as good as shuffled and the same on every machine. Only the keys are
    sorted, on the local disk if they do not fit into memory.

    Args:
        spark: The session.
        table: The version.
        rows_per_file: Number of rows of a file, by split.
        storage: Locations, for temporary files.
    """
    starts: dict[str, list[str]] = {split: [] for split in rows_per_file}
    num_rows = dict.fromkeys(rows_per_file, 0)
    with Relations(storage) as relations:
        relations.add("images", snapshots.version_rows(spark, table, KEYS_ARROW, scratch_root(storage)))
        for batch in relations.batches("FROM images ORDER BY split, sha256", KEYS_ARROW):
            for split, step in rows_per_file.items():
                hashes = batch.filter(pc.equal(batch["split"], split))["sha256"]
                starts[split] += hashes[-num_rows[split] % step :: step].to_pylist()
                num_rows[split] += len(hashes)
    return {split: hashes[1:] for split, hashes in starts.items()}


def with_files(spark: SparkSession, images: DataFrame, starts: FileStarts, classes: Sequence[str]) -> DataFrame:
    """Return each image's place in the cache: split, file, sha256, label_index and content; nothing is shuffled."""
    digits = len(f"{max(map(len, starts.values())):x}")  # at least as many prefixes as files
    prefixes = [f"{number:0{digits}x}" for number in range(16**digits)]
    rows = []
    for split, hashes in starts.items():
        # Files that begin before the first sha256 with a prefix, and the few that begin within it.
        bounds = [bisect_left(hashes, prefix) for prefix in prefixes] + [len(hashes)]
        rows += [
            {"split": split, "prefix": prefix, "before": low, "within": hashes[low:high]}
            for prefix, low, high in zip(prefixes, bounds, bounds[1:], strict=False)
        ]
    ranges = spark.createDataFrame(pa.Table.from_pylist(rows, schema=RANGES_ARROW))
    labels = spark.createDataFrame(pa.table({"label_index": range(len(classes)), "label": list(classes)}))
    file = F.col("before") + F.size(F.filter("within", lambda start: start <= F.col("sha256")))
    return (
        images.withColumn("prefix", F.substring("sha256", 1, digits))
        .join(F.broadcast(ranges), on=["split", "prefix"], how="inner")
        .join(F.broadcast(labels), on="label", how="inner")
        .select("split", file.alias("file"), "sha256", "label_index", "content")
    )
