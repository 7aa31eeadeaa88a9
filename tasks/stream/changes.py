"""The source of a stream: the change data feed of a table, and the last change of each image in a batch."""

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from tasks.config.stream import StreamConfig
from tasks.errors import WrongInput
from tasks.schema import CHANGE_FEED
from tasks.spark.file_systems import prepare_store
from tasks.tables.delta_internals import Snapshot
from tasks.tables.relations import Relations

CHANGE, VERSION = "_change_type", "_commit_version"
"""Columns of Delta's change data feed."""

KEPT = ("insert", "update_postimage")
"""Changes after which an image is in the table; the others are `delete` and `update_preimage`."""

CHANGES_ARROW = pa.schema(
    [("sha256", pa.string()), (CHANGE, pa.string()), (VERSION, pa.int64()), ("label", pa.string())]
)

LAST_CHANGES = f"""
CREATE TABLE present AS
SELECT sha256, {VERSION}, count(*) AS num_rows, min(label) AS label
FROM (
    -- In one commit, the row that it removes comes before the row that it adds.
    SELECT *, rank() OVER (PARTITION BY sha256 ORDER BY {VERSION} DESC, {CHANGE} IN {KEPT} DESC) AS place FROM changes
)
WHERE place = 1 AND {CHANGE} IN {KEPT}
GROUP BY sha256, {VERSION}
"""  # noqa: S608  # constants


def check_feed(images: Snapshot) -> None:
    """Check that a table records its changes.

    Raises:
        WrongInput: It has no change data feed.
    """
    path = images.table.path
    if images.properties.get(CHANGE_FEED, "").lower() != "true":
        raise WrongInput(
            f"'{path}' has no change data feed, which a stream reads: run ALTER TABLE delta.`{path}` SET TBLPROPERTIES "
            f"({CHANGE_FEED} = true) in Spark, or use the flow predict-batch"
        )


def read_changes(spark: SparkSession, path: str, stream: StreamConfig) -> DataFrame:
    """Return the change data feed of a table as a streaming frame; a new stream begins with the rows that are there."""
    prepare_store(spark, path)
    return (
        spark.readStream.format("delta")
        .option("readChangeFeed", "true")
        .option("maxFilesPerTrigger", stream.max_files_per_batch)
        .option("maxBytesPerTrigger", stream.max_megabytes_per_batch * 10**6)
        .load(path)
    )


def changed_keys(changes: DataFrame) -> pa.Table:
    """Return the rows of a batch without their images, as CHANGES_ARROW; label is null in a table without labels.

    They are collected: a batch is bounded, and a row takes about a hundred bytes.

    Raises:
        WrongInput: An image has no sha256, the key of its prediction.
    """
    has_labels = "label" in changes.columns and changes.schema["label"].dataType == StringType()
    label = F.col("label") if has_labels else F.lit(None).cast("string").alias("label")
    keys = changes.select("sha256", CHANGE, VERSION, label).toArrow().cast(CHANGES_ARROW)
    if nulls := keys["sha256"].null_count:
        raise WrongInput(
            f"sha256 is null in {nulls} of {keys.num_rows} changed rows: it is the key of a prediction, so set it in "
            "every row"
        )
    return keys


def add_last_changes(relations: Relations, changes: pa.Table) -> None:
    """Create the table `present` of the images that are in the source after all changes of a batch.

    It has a row per image: sha256, the version of its last change, the number of rows that this change added, and a
    label.

    Args:
        relations: The database.
        changes: Rows of CHANGES_ARROW.
    """
    relations.add("changes", changes)
    relations.run(LAST_CHANGES)
