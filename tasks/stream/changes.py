"""The source of a stream: the change data feed of a table, and the images of a batch that have no prediction."""

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from tasks.config.prediction import StreamConfig
from tasks.errors import WrongInput
from tasks.predict.scoring import spread
from tasks.schema import CHANGE_FEED
from tasks.spark.file_systems import prepare_store
from tasks.spark.session import BROADCAST_ROWS
from tasks.storage import Storage
from tasks.tables.delta_internals import Snapshot
from tasks.tables.parquet_rows import ParquetRows
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

PENDING_ARROW = pa.schema([("sha256", pa.string()), (VERSION, pa.int64())])

PENDING = """
CREATE TABLE pending AS
-- The images of a batch are the hash table of the join, and not all predictions.
WITH predicted AS (
    SELECT sha256 FROM predictions SEMI JOIN present USING (sha256) WHERE error IS NULL OR NOT $retry_errors
)
FROM present ANTI JOIN predicted USING (sha256)
"""

STILL_THERE = "DELETE FROM pending WHERE sha256 NOT IN (SELECT sha256 FROM images SEMI JOIN present USING (sha256))"


@dataclass(frozen=True)
class PendingChanges:
    """The images of a batch to predict.

    Attributes:
        images: Rows of PENDING_ARROW.
        labels: Their labels.
        repeats: Whether an image has several rows.
    """

    images: pa.Table
    labels: frozenset[str]
    repeats: bool

    def contents(self, changes: DataFrame) -> DataFrame:
        """Return sha256 and content of these images of a batch, as `spread`."""
        num = self.images.num_rows
        chosen = changes.sparkSession.createDataFrame(self.images)
        chosen = F.broadcast(chosen) if num <= BROADCAST_ROWS else chosen
        rows = changes.where(F.col(CHANGE).isin(*KEPT)).select("sha256", VERSION, "content")
        images = rows.join(chosen, on=["sha256", VERSION], how="left_semi").select("sha256", "content")
        if self.repeats:
            images = images.groupBy("sha256").agg(F.min("content").alias("content"))
        return spread(images, num)


def check_feed(images: Snapshot) -> None:
    """Check that a table records its changes.

    Raises:
        WrongInput: It has no change data feed.
    """
    path = images.table.path
    if images.properties.get(CHANGE_FEED, "").lower() != "true":
        raise WrongInput(
            f"'{path}' has no change data feed, which a stream reads",
            way_out=f"run ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({CHANGE_FEED} = true) in Spark, or use the "
            "flow predict-batch",
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
            f"sha256 is null in {nulls} of {keys.num_rows} changed rows",
            way_out="it is the key of a prediction, so set it in every row",
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


def pending_changes(
    keys: pa.Table,
    predictions: pa.Table | ParquetRows,
    images: ParquetRows | None,
    storage: Storage,
    *,
    retry_errors: bool,
) -> PendingChanges:
    """Return the images of a batch that are in the source and have no prediction.

    Args:
        keys: Rows of CHANGES_ARROW.
        predictions: The predictions by the model version, with the columns sha256 and error.
        images: The images of the newest version, where those that were deleted since the batch are left out.
        storage: Storage with the home, to which queries spill.
        retry_errors: Whether an image whose prediction has an error is pending.
    """
    with Relations(storage) as relations:
        add_last_changes(relations, keys)
        relations.add("predictions", predictions)
        relations.run(PENDING, {"retry_errors": retry_errors})
        if images is not None:
            relations.add("images", images)
            relations.run(STILL_THERE)
        ((repeats,),) = relations.rows("SELECT count(*) FILTER (num_rows > 1) > 0 FROM pending")
        labels = relations.rows("SELECT DISTINCT label FROM pending WHERE label IS NOT NULL ORDER BY label")
        pending = relations.table(f"SELECT sha256, {VERSION} FROM pending", PENDING_ARROW)  # noqa: S608  # a constant
        return PendingChanges(pending, frozenset(label for (label,) in labels), bool(repeats))
