"""What became of every file: the source compared with the tables, and the outcome of each file, order aside."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from tasks.etl.decode import Reason
from tasks.schema import DUPLICATE, QUARANTINED, STORED

NEW, AGAIN, UNCHANGED, GONE = "new", "again", "unchanged", "gone"

PICTURE = ["sha256", "label", "split"]
"""What says that a file and a row of `images` are the same picture."""

READ_AGAIN = (
    Reason.LABEL_CONFLICT.value,
    Reason.SPLIT_CONFLICT.value,
    Reason.UNREADABLE.value,
    Reason.TOO_MANY_PIXELS.value,
    Reason.TOO_SMALL.value,
)
"""Reasons that something other than the file can settle: its other side, its permissions, a setting."""


def compare_files(listing: DataFrame, known: DataFrame | None, held: DataFrame) -> DataFrame:
    """Return one row a path of the listing or the ledger, with its status.

    Args:
        listing: path, label, split, size, modified_at of what the source holds now.
        known: The ledger's rows of files that were there. Another label or predefined split makes a file new.
        held: sha256, label and split of every row of `images`. A file that the ledger calls stored and whose picture is
            not there counts as new: a run was killed between its two commits, or somebody lost the table.

    Returns:
        path, status (new, again: unchanged but read again, unchanged, gone), what the listing knows, sha256, outcome,
        reason and detail of the ledger, and `held`: whether the file's picture is in `images`.
    """
    if known is None:
        nothing = {name: F.lit(None).cast("string") for name in ("sha256", "outcome", "reason", "detail")}
        names = ("path", "label", "split", "size", "modified_at")
        return listing.select("path", F.lit(NEW).alias("status"), *names[1:]).withColumns(
            nothing | {"held": F.lit(None).cast("boolean")}
        )
    pair = (
        (F.col("l.size") == F.col("k.size"))
        & (F.col("l.modified_at") == F.col("k.modified_at"))
        & F.col("l.label").eqNullSafe(F.col("k.label"))
        # Where the content decides, the listing has no split and the ledger's holds.
        & F.coalesce("l.split", "k.split").eqNullSafe(F.col("k.split"))
    )
    status = F.when(F.col("l.path").isNull(), GONE).when(pair, UNCHANGED).otherwise(NEW)
    paths = (
        listing.alias("l")
        .join(known.alias("k"), on="path", how="full_outer")
        .select(
            "path",
            status.alias("status"),
            *(F.coalesce(f"l.{name}", f"k.{name}").alias(name) for name in ("label", "split", "size", "modified_at")),
            *(f"k.{name}" for name in ("sha256", "outcome", "reason", "detail")),
        )
    )
    unchanged = F.col("status") == UNCHANGED
    lost = unchanged & (F.col("outcome") == STORED) & F.col("held").isNull()
    again = unchanged & F.col("reason").isin(*READ_AGAIN)
    return (
        paths.join(held.withColumn("held", F.lit(True)), on=PICTURE, how="left")
        .withColumn("status", F.when(lost, NEW).when(again, AGAIN).otherwise(F.col("status")))
        .select(*paths.columns, "held")
    )


def resolve_outcomes(files: DataFrame) -> DataFrame:
    """Give every file of the source its outcome; the result does not depend on the order in which files arrived.

    Args:
        files: path, label, split, size, modified_at, sha256, reason and detail of every file that is there;
            reason is null where the file itself is sound.

    Returns:
        The same with outcome: of sound files with one content, label and split the first by path is stored and the
        others are duplicates; with more than one label or split all are quarantined.
    """
    same = Window.partitionBy("sha256", F.col("reason").isNull())
    sound = F.col("reason").isNull()
    first = F.row_number().over(same.orderBy("path")) == 1
    labels, splits = (F.sort_array(F.collect_set(name).over(same)) for name in ("label", "split"))
    two_labels, two_splits = sound & (F.size(labels) > 1), sound & (F.size(splits) > 1)
    return files.select(
        "path",
        "label",
        "split",
        "size",
        "modified_at",
        "sha256",
        F.when(~sound | two_labels | two_splits, QUARANTINED).when(first, STORED).otherwise(DUPLICATE).alias("outcome"),
        F.when(two_labels, Reason.LABEL_CONFLICT.value)
        .when(two_splits, Reason.SPLIT_CONFLICT.value)
        .otherwise(F.col("reason"))
        .alias("reason"),
        F.when(two_labels, F.concat(F.lit("the same content under the labels "), F.array_join(labels, ", ")))
        .when(two_splits, F.concat(F.lit("the same content in the splits "), F.array_join(splits, ", ")))
        .otherwise(F.col("detail"))
        .alias("detail"),
    )


def kept_pictures(ledger: DataFrame, listing: DataFrame, live: DataFrame, held: DataFrame) -> DataFrame:
    """Return sha256, label and split of the pictures in `images` that stay though their files are deleted.

    Args:
        ledger: All rows of the ledger, of deleted files too.
        listing: path of every file that is there.
        live: sha256 of every file that is there: where the same content is back, its files decide.
        held: sha256, label and split of every row of `images`.
    """
    gone = ledger.join(listing.select("path"), on="path", how="left_anti")
    gone = gone.join(live.select("sha256"), on="sha256", how="left_anti")
    return held.join(gone.select(*PICTURE), on=PICTURE, how="left_semi")
