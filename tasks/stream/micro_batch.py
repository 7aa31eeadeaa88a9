"""The processing of one batch of a stream: its images without a prediction are predicted and merged."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.config.prediction import PredictConfig
from tasks.predict.batch import unlearned_labels, warn_of_unlearned
from tasks.predict.least_confident import SHA256_ARROW
from tasks.predict.pending import PREDICTED_ARROW
from tasks.predict.predictions import predicted_by
from tasks.predict.scoring import SentModel, score, send_package, spread
from tasks.predict.write import write
from tasks.progress.count import counted
from tasks.refs import ModelRef, TableRef
from tasks.spark.scratch import scratch_root
from tasks.spark.session import BROADCAST_ROWS
from tasks.storage import Storage
from tasks.stream.changes import CHANGE, KEPT, VERSION, add_last_changes, changed_keys
from tasks.stream.counts import StreamCounts
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.stream")

FindModel = Callable[[SparkSession], tuple[TableRef, ModelRef]]
"""A function that returns the source's newest version, and the model version that now has the alias."""

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
class _Pending:
    """The images of a batch to predict.

    Attributes:
        images: Rows of PENDING_ARROW.
        labels: Their labels.
        repeats: Whether an image has several rows.
    """

    images: pa.Table
    labels: frozenset[str]
    repeats: bool


class ModelOnWorkers:
    """The model version that was sent to the workers last: the next batches use it until the alias moves."""

    def __init__(self) -> None:
        """Begin without a model."""
        self._sent: SentModel | None = None

    def send(self, spark: SparkSession, storage: Storage, model: ModelRef, predict: PredictConfig) -> SentModel:
        """Return a model version on the workers, to which it is sent unless it was the last one.

        Raises:
            WrongInput: As `send_package`.
        """
        if self._sent is None or self._sent.model != model:
            self._sent = send_package(spark, storage, model, predict)
            logger.info("the stream predicts with %s version %d", model.name, model.version)
        return self._sent


class BatchPredictor:
    """A function of a streaming query that predicts the images of each batch, in one commit.

    A batch whose run was killed comes again. Its images that have a prediction are left out, and a batch without other
    images has no commit. The MERGE by key does not insert a row twice even if two drivers repeat a batch. Delta's own
    record of written batches (txnAppId and txnVersion) would not do more. It knows neither the rows of predict-batch
    nor those of an earlier checkpoint, and would skip a repeated batch whose alias has moved to another version.
    """

    def __init__(
        self, predictions: str, find: FindModel, predict: PredictConfig, storage: Storage, *, is_repetition: bool
    ) -> None:
        """Create the function.

        Args:
            predictions: Path or URL of the table to write, which exists.
            find: Looks up the source and the model version.
            predict: Settings of inference.
            storage: Storage with the home and the models.
            is_repetition: Whether an earlier run began the first batch. It may have failed for its images, so those
                that were deleted since are left out; in other batches, that would cost a look at all images.
        """
        self.counts = StreamCounts()
        self._predictions, self._find, self._predict, self._storage = predictions, find, predict, storage
        self._is_repetition = is_repetition
        self._model = ModelOnWorkers()

    def __call__(self, changes: DataFrame) -> None:
        """Process a batch of the change data feed.

        Raises:
            WrongInput: More errors than `predict.max_error_fraction`, a missing sha256, or as `find`.
            TableChanged: Another driver wrote to a table of predictions on a store.
            DiskFull: The disk is full; the batch was not written.
        """
        began, spark, counts = time.perf_counter(), changes.sparkSession, self.counts
        keys, num = changed_keys(changes), 0
        if keys.num_rows:  # A commit that changes no rows, such as compaction, gives a batch without any.
            with write_access(self._predictions, spark), translate_disk_full(self._predictions, self._storage.home):
                # Looked up once per batch, so that all rows of a batch are by one version.
                table, counts.model = self._find(spark)
                pending = self._pending(spark, keys, table, counts.model)
                num = pending.images.num_rows
                if num:
                    self._predict_images(changes, pending, table, counts.model)
        self._is_repetition = False
        seconds = time.perf_counter() - began
        counts.add_batch(num, seconds)
        logger.info("batch of %d changes: %d images predicted in %.1f s", keys.num_rows, num, seconds)

    def _pending(self, spark: SparkSession, keys: pa.Table, table: TableRef, model: ModelRef) -> _Pending:
        predicted = predicted_by(spark, model, self._predictions, PREDICTED_ARROW, self._storage)
        with Relations(self._storage) as relations:
            add_last_changes(relations, keys)
            relations.add("predictions", predicted)
            relations.run(PENDING, {"retry_errors": self._predict.retry_errors})
            if self._is_repetition:
                relations.add("images", snapshots.version_rows(spark, table, SHA256_ARROW, scratch_root(self._storage)))
                relations.run(STILL_THERE)
            ((repeats,),) = relations.rows("SELECT count(*) FILTER (num_rows > 1) > 0 FROM pending")
            labels = relations.rows("SELECT DISTINCT label FROM pending WHERE label IS NOT NULL ORDER BY label")
            images = relations.table(f"SELECT sha256, {VERSION} FROM pending", PENDING_ARROW)  # noqa: S608  # a constant
            return _Pending(images, frozenset(label for (label,) in labels), bool(repeats))

    def _predict_images(self, changes: DataFrame, pending: _Pending, table: TableRef, model: ModelRef) -> None:
        sent = self._model.send(changes.sparkSession, self._storage, model, self._predict)
        unlearned = unlearned_labels(pending.labels, sent.classes)
        warn_of_unlearned(tuple(sorted(unlearned - self.counts.unlearned)), table, model)
        self.counts.unlearned |= unlearned
        with counted("predict", pending.images.num_rows):
            rows = score(_contents(changes, pending), sent, self._predict)
            self.counts.errors += write(rows, self._predictions, model, self._predict)


def _contents(changes: DataFrame, pending: _Pending) -> DataFrame:
    """Return sha256 and content of the pending images of a batch, as `spread`."""
    num = pending.images.num_rows
    chosen = changes.sparkSession.createDataFrame(pending.images)
    chosen = F.broadcast(chosen) if num <= BROADCAST_ROWS else chosen
    rows = changes.where(F.col(CHANGE).isin(*KEPT)).select("sha256", VERSION, "content")
    images = rows.join(chosen, on=["sha256", VERSION], how="left_semi").select("sha256", "content")
    if pending.repeats:
        images = images.groupBy("sha256").agg(F.min("content").alias("content"))
    return spread(images, num)
