"""Images of a table that a cache leaves out, since they cannot be decoded: their bounds and their names."""

import logging
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.cache.manifest import QuarantinedImage
from tasks.errors import WrongInput, loggable
from tasks.refs import TableRef
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.text.forms import shown

logger = logging.getLogger("lakevision.cache")

MAX_NAMED = 20
"""Number of images that cannot be decoded that log and artifact name; the manifest has all of them."""

MAX_LEFT_OUT, MAX_LEFT_OUT_FRACTION = 1000, 0.01
"""Largest number and fraction of a table's images that a cache may leave out; one image always may be."""


def check_left_out(images: DataFrame, total: int, quarantined: Sequence[QuarantinedImage], table: TableRef) -> None:
    """Check that few images are left out of a cache, and that each class keeps some.

    Args:
        images: Rows of the table.
        total: Their number.
        quarantined: Those that cannot be decoded; not empty.
        table: The version, for the error message.

    Raises:
        WrongInput: More than MAX_LEFT_OUT_FRACTION of the images, more than MAX_LEFT_OUT, or all of a class are.
    """
    number = len(quarantined)
    problem = f"{number} of {total} images"
    if number <= max(1, min(MAX_LEFT_OUT, total * MAX_LEFT_OUT_FRACTION)):
        is_left_out = F.col("sha256").isin([image.sha256 for image in quarantined])
        without = images.groupBy("label").agg(F.every(is_left_out).alias("is_lost")).where("is_lost")
        if not (lost := sorted(row["label"] for row in without.collect())):
            return
        problem = f"all images of {shown(lost)}"
    example = loggable(quarantined[0].reason)
    raise WrongInput(
        f"{problem} in '{table.path}' version {table.version} cannot be decoded here, e.g. {example}",
        way_out="check that the Spark workers have the Pillow of the lock file, or ingest the source into a new table",
    )


def with_paths(spark: SparkSession, bad: Sequence[QuarantinedImage], storage: Storage) -> list[QuarantinedImage]:
    """Return images that cannot be decoded with their paths in the table `files`; log a warning that names them."""
    files = snapshots.newest_snapshot(spark, storage.table("files"))
    paths = {}
    if files is not None:
        rows = snapshots.read_version(spark, files.table).where(F.col("sha256").isin([image.sha256 for image in bad]))
        paths = {row["sha256"]: row["path"] for row in rows.select("sha256", "path").collect()}
    named = [image.model_copy(update={"path": paths.get(image.sha256, "")}) for image in bad]
    shown = [f"{loggable(image.path) or image.sha256} ({loggable(image.reason)})" for image in named[:MAX_NAMED]]
    logger.warning("%d images cannot be decoded, and are left out of the cache: %s", len(bad), ", ".join(shown))
    return named
