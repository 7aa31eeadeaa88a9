"""Images without a prediction by a model version."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from tasks.errors import WrongInput
from tasks.predict.least_confident import SHA256_ARROW
from tasks.refs import ModelRef, TableRef
from tasks.schema import PREDICTIONS, PREDICTIONS_KEY
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

KEYS_ARROW = pa.schema([to_arrow_schema(PREDICTIONS).field(name) for name in PREDICTIONS_KEY])

PENDING = """
CREATE TABLE pending AS
SELECT sha256 FROM (SELECT sha256, hash(sha256) AS one, hash(sha256 || '~') AS two FROM images)
ANTI JOIN (SELECT hash(sha256) AS one, hash(sha256 || '~') AS two FROM predictions) USING (one, two)
"""
"""Images without a prediction, by two 64-bit hashes of sha256: ten million of the texts would not fit into memory."""


@dataclass(frozen=True)
class PendingImages:
    """Images without a prediction by a model version.

    Attributes:
        count: Their number.
        num_images: Number of all images of the table.
    """

    count: int
    num_images: int
    _relations: Relations

    def table(self) -> pa.Table:
        """Return the sha256 of the images as a table in memory."""
        return self._relations.table("FROM pending", SHA256_ARROW)


@contextmanager
def pending_images(
    spark: SparkSession | None, table: TableRef, predictions: str, model: ModelRef, storage: Storage
) -> Iterator[PendingImages]:
    """Yield the images without a prediction by this model version; both tables stay on the disk.

    Raises:
        WrongInput: An image has no sha256, the key of its prediction.
    """
    scratch = scratch_root(storage)
    newest = snapshots.newest_snapshot(spark, predictions)
    predicted: pa.Table | ParquetRows = KEYS_ARROW.empty_table()
    if newest is not None:
        by_model: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
        predicted = snapshots.version_rows(spark, newest.table, KEYS_ARROW, scratch, by_model)
    with Relations(storage) as relations:
        relations.add("images", snapshots.version_rows(spark, table, SHA256_ARROW, scratch))
        relations.add("predictions", predicted)
        ((num_images, nulls),) = relations.rows("SELECT count(*), count(*) - count(sha256) FROM images")
        if nulls:
            raise WrongInput(
                f"predict.table is '{table.path}', where sha256 is null in {nulls} of {num_images} rows: "
                "it is the key of a prediction, so set it in every row"
            )
        relations.run(PENDING)
        ((count,),) = relations.rows("SELECT count(*) FROM pending")
        yield PendingImages(count, num_images, relations)
