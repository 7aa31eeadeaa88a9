"""Images without a prediction by a model version."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from tasks.errors import WrongInput
from tasks.refs import TableRef
from tasks.schema import PREDICTIONS_ARROW, PREDICTIONS_KEY, columns_of
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

logger = logging.getLogger("lakevision.predict")

SHA256_ARROW = pa.schema([("sha256", pa.string())])
LABELLED_ARROW = SHA256_ARROW.append(pa.field("label", pa.string()))
PREDICTED_ARROW = columns_of(PREDICTIONS_ARROW, *PREDICTIONS_KEY, "error")

KEYS_ARROW = pa.schema([pa.field("key", pa.int64(), nullable=False)])
KEY = "('0x' || md5(sha256)[:15])::BIGINT"
"""The first 60 bits of the MD5 of sha256, a text of any form in a foreign table; `content_key` is the same in Spark."""

PENDING = """
CREATE TABLE pending AS
SELECT sha256 FROM (SELECT sha256, hash(sha256) AS one, hash(sha256 || '~') AS two FROM images)
ANTI JOIN (
    SELECT hash(sha256) AS one, hash(sha256 || '~') AS two FROM predictions WHERE error IS NULL OR NOT $retry_errors
) USING (one, two)
"""
"""Images without a prediction, by two 64-bit hashes of sha256: ten million of the texts would not fit into memory."""


@dataclass(frozen=True)
class PendingImages:
    """Images without a prediction by a model version.

    Attributes:
        count: Number of different images.
    """

    count: int
    _num_rows: int
    """Number of their rows; larger than `count` if another program wrote an image twice."""
    _num_images: int
    """Number of all rows of the table."""
    _table: TableRef
    _has_labels: bool
    _relations: Relations

    def labels(self) -> tuple[str, ...]:
        """Return the labels of the table in alphabetical order; none if it has no labels as text."""
        if not self._has_labels:
            return ()
        query = "SELECT DISTINCT label FROM images WHERE label IS NOT NULL ORDER BY label"
        return tuple(label for (label,) in self._relations.rows(query))

    def contents(self, spark: SparkSession) -> DataFrame:
        """Return sha256 and content of the images, as `contents_of`."""
        rows = snapshots.read_version(spark, self._table).select("sha256", "content")
        if self._num_rows > self.count:
            logger.warning(
                "%d rows of %s repeat the sha256 of another row; the image of each sha256 is predicted once",
                self._num_rows - self.count, self._table.path,
            )  # fmt: skip
            return contents_of(rows, self._keys("="), self._keys(">"))
        # An image with the same key as a pending one is predicted again, and not inserted twice.
        return contents_of(rows, self._keys("=")) if self._num_rows < self._num_images else rows

    def _keys(self, compared: str) -> pa.Table:
        """Return the images with one row (=) or several (>) in memory, a KEY of each: 8 bytes, not the 64 of sha256."""
        query = f"SELECT {KEY} AS key FROM pending GROUP BY sha256 HAVING count(*) {compared} 1"  # noqa: S608  # constants
        return self._relations.table(query, KEYS_ARROW)


def content_key(sha256: Column) -> Column:
    """Return KEY of a column of sha256."""
    return F.conv(F.substring(F.md5(sha256), 1, 15), 16, 10).cast("long")


def contents_of(images: DataFrame, keys: pa.Table, repeated: pa.Table | None = None) -> DataFrame:
    """Return the rows of some images, without a shuffle of those that the table has once.

    Images with the same 60 bits of a hash as a wanted one are also returned.

    Args:
        images: Columns sha256 and content.
        keys: KEYS_ARROW of the images that the table has once.
        repeated: The same of those with several rows, of which the one with the smallest digest is returned.
    """

    def chosen(wanted: pa.Table) -> DataFrame:
        found = F.broadcast(images.sparkSession.createDataFrame(wanted))
        return images.join(found, content_key(images["sha256"]) == found["key"], how="left_semi")

    if repeated is None or not repeated.num_rows:
        return chosen(keys)
    once = chosen(repeated).groupBy("sha256").agg(F.min_by("content", F.sha2("content", 256)).alias("content"))
    return chosen(keys).unionByName(once)


def check_images(columns: Iterable[str], path: str) -> None:
    """Check that a table has the columns that inference reads.

    Raises:
        WrongInput: Columns are missing; the message names them.
    """
    missing = sorted({"sha256", "content"} - set(columns))
    if missing:
        raise WrongInput(
            f"predict.table is '{path}', which has no column {', '.join(missing)}",
            setting="predict.table",
            way_out="give a table with sha256 (string) and content (binary, an encoded image)",
        )


def check_keys(path: str, num_images: int, nulls: int) -> None:
    """Check that all images of a table have a sha256.

    Raises:
        WrongInput: Some have none.
    """
    if nulls:
        raise WrongInput(
            f"predict.table is '{path}', where sha256 is null in {nulls} of {num_images} rows",
            setting="predict.table",
            way_out="it is the key of a prediction, so set it in every row",
        )


@contextmanager
def pending_images(
    spark: SparkSession | None,
    table: TableRef,
    predicted: pa.Table | ParquetRows,
    storage: Storage,
    *,
    retry_errors: bool = False,
) -> Iterator[PendingImages]:
    """Yield the images of a table without a prediction; table and predictions stay on the disk.

    Args:
        spark: The session, or None.
        table: The table of images.
        predicted: The predictions by a model version (PREDICTED_ARROW).
        storage: Storage with the home, to which queries spill.
        retry_errors: Whether images with an error are pending.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
        WrongInput: An image has no sha256, the key of its prediction; or as `check_images`.
    """
    types = {field.name: field.dataType for field in snapshots.schema_of(spark, table)}
    check_images(types, table.path)
    has_labels = types.get("label") == StringType()
    with Relations(storage) as relations:
        columns = LABELLED_ARROW if has_labels else SHA256_ARROW
        relations.add("images", snapshots.version_rows(spark, table, columns, scratch_root(storage)))
        relations.add("predictions", predicted)
        ((num_images, nulls),) = relations.rows("SELECT count(*), count(*) - count(sha256) FROM images")
        check_keys(table.path, num_images, nulls)
        relations.run(PENDING, {"retry_errors": retry_errors})
        ((num_rows, count),) = relations.rows("SELECT count(*), count(DISTINCT hash(sha256)) FROM pending")
        yield PendingImages(count, num_rows, num_images, table, has_labels, relations)
