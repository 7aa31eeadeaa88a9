"""What became of every file: the source compared with the tables, and the outcome of each file, order aside."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from tasks.etl.decode import Reason
from tasks.schema import DUPLICATE, QUARANTINED, STORED

NEW, UNCHANGED, GONE = "new", "unchanged", "gone"

READ_AGAIN = (Reason.LABEL_CONFLICT.value, Reason.UNREADABLE.value, Reason.TOO_MANY_PIXELS.value)
"""Reasons that something other than the file can settle: its other side, its permissions, a setting."""


def compare_files(listing: DataFrame, known: DataFrame, held: DataFrame) -> DataFrame:
    """Return one row a path of the listing or the ledger, with its status.

    Args:
        listing: path, label, size, modified_at of what the source holds now.
        known: The ledger's rows of files that were there.
        held: sha256 and label of every row of `images`. A file that the ledger calls stored and whose picture is not
            there counts as new: a run was killed between its two commits, or somebody lost the table.

    Returns:
        path, status (new, unchanged, gone), what the listing knows, sha256, outcome, reason and detail of the ledger,
        and `held`: whether the file's picture is in `images`.
    """
    pair = (F.col("l.size") == F.col("k.size")) & (F.col("l.modified_at") == F.col("k.modified_at"))
    status = F.when(F.col("l.path").isNull(), GONE).when(pair, UNCHANGED).otherwise(NEW)
    paths = (
        listing.alias("l")
        .join(known.alias("k"), on="path", how="full_outer")
        .select(
            "path",
            status.alias("status"),
            *(F.coalesce(f"l.{name}", f"k.{name}").alias(name) for name in ("label", "size", "modified_at")),
            *(f"k.{name}" for name in ("sha256", "outcome", "reason", "detail")),
        )
    )
    lost = (F.col("status") == UNCHANGED) & (F.col("outcome") == STORED) & F.col("held").isNull()
    return (
        paths.join(held.withColumn("held", F.lit(True)), on=["sha256", "label"], how="left")
        .withColumn("status", F.when(lost, NEW).otherwise(F.col("status")))
        .select(*paths.columns, "held")
    )


def resolve_outcomes(files: DataFrame) -> DataFrame:
    """Give every file of the source its outcome; the result does not depend on the order in which files arrived.

    Args:
        files: path, label, size, modified_at, sha256, reason and detail of every file that is there;
            reason is null where the file itself is sound.

    Returns:
        The same with outcome: of sound files with one content and one label the first by path is stored and the
        others are duplicates; with more than one label all are quarantined.
    """
    same = Window.partitionBy("sha256", F.col("reason").isNull())
    sound = F.col("reason").isNull()
    labels = F.size(F.collect_set("label").over(same))
    conflict = sound & (labels > 1)
    first = F.row_number().over(same.orderBy("path")) == 1
    named = F.array_join(F.sort_array(F.collect_set("label").over(same)), ", ")
    return files.select(
        "path",
        "label",
        "size",
        "modified_at",
        "sha256",
        F.when(~sound | conflict, QUARANTINED).when(first, STORED).otherwise(DUPLICATE).alias("outcome"),
        F.when(conflict, Reason.LABEL_CONFLICT.value).otherwise(F.col("reason")).alias("reason"),
        F.when(conflict, F.concat(F.lit("the same content under the labels "), named))
        .otherwise(F.col("detail"))
        .alias("detail"),
    )
