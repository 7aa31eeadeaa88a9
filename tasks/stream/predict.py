"""Streaming inference: the images that are added to a table are predicted by the champion, batch by batch."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tasks.config.prediction import PredictConfig, StreamConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import UserError, WrongInput
from tasks.predict.champion import check_model, model_of_table, named_model
from tasks.predict.pending import PREDICTED_ARROW, SHA256_ARROW, check_images
from tasks.predict.predictions import check_paths, create_predictions, predicted_by, predictions_setting, write
from tasks.predict.results import table_results
from tasks.predict.scoring import score, start_workers, unlearned_labels, warn_of_unlearned
from tasks.progress.count import counted
from tasks.refs import ModelRef, StreamReport, TableRef
from tasks.spark.cluster import check_file_visible, check_visible
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage, csv_file
from tasks.stream.changes import PendingChanges, changed_keys, check_feed, pending_changes, read_changes
from tasks.stream.checkpoint import (
    RESTART,
    checkpoint_root,
    measure_lag,
    open_checkpoint,
    read_begun,
    read_position,
    remove_older,
)
from tasks.stream.query import ColumnsChanged, explain_failure, run_query
from tasks.stream.run import ModelOnWorkers, Paced, ShowProgress, StreamCounts, log_end
from tasks.stream.source_stream import stream_source
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots
from tasks.tables.writer import write_access
from tasks.text.markup import text_of

logger = logging.getLogger("lakevision.stream")

MAX_STUCK = 2
"""Number of starts of a query without a batch, after changes of the table's columns, that show that it is stuck."""


def predict_stream(
    stream: StreamConfig,
    predict: PredictConfig,
    promote: PromoteConfig,
    storage: Storage,
    config: SparkConfig,
    show: ShowProgress | None = None,
) -> StreamReport:
    """Predict the images that were added to a table since the last run, and merge the result into `predictions`.

    The first run predicts the images that are there. Spark is not started if the table has no changes. With
    `predict.source`, it is `stream_source`.

    Args:
        stream: Settings of the stream.
        predict: Settings of inference.
        promote: Settings with the name of the registered model; without a name, the model trained from the table.
        storage: Locations of tables and models.
        config: Settings of the Spark session.
        show: Called after each batch.

    Raises:
        WrongInput: The model, alias or table does not exist, or the table has no change data feed or lacks columns. The
            changes to read were deleted, or the checkpoint is damaged. A batch has too many errors.
        TableInUse: Another driver runs the same stream on a store.
        DiskFull: The disk is full; the next run continues.
    """
    if predict.source:
        return stream_source(stream, predict, promote, storage, config, show)
    path = predict.table or storage.table("images")
    predictions = predict.predictions or storage.table("predictions")
    check_paths(path, predictions, predict, storage)
    return try_without_spark(_Run(path, predictions, stream, predict, promote, storage, show), config, storage)


@dataclass(frozen=True)
class _Run:
    """A run of the stream; the fields are as in `predict_stream`, with the paths or URLs of two tables."""

    path: str
    predictions: str
    stream: StreamConfig
    predict: PredictConfig
    promote: PromoteConfig
    storage: Storage
    show: ShowProgress | None
    counts: StreamCounts = field(default_factory=StreamCounts)
    sent: ModelOnWorkers = field(default_factory=ModelOnWorkers)
    paced: Paced = field(default_factory=Paced)
    checked: set[tuple[TableRef, ModelRef]] = field(default_factory=set)
    """Models that were checked, with the source of their table: a warning is logged once, not for each batch."""

    def __call__(self, spark: SparkSession | None) -> StreamReport:
        """Run the stream, without a session if that is possible."""
        table, model = self._find(spark)
        images = snapshots.newest_snapshot(spark, self.path)
        assert images is not None, self.path
        check_images(images.schema.names, self.path)
        check_feed(images)
        given = self.promote.model_name or "", self.predict.alias
        table_id = create_predictions(spark, self.predictions)
        root = checkpoint_root(self.predictions, "changes", table.table_id, table_id, *given)
        with exclusive_lock(root, spark):
            checkpoint = open_checkpoint(root, restart=self.stream.restart)
            position = read_position(checkpoint)
            lag = measure_lag(self.path, position)
            if self.stream.interval_seconds is not None or position.is_unfinished or lag.versions:
                if spark is None:
                    raise NeedsSpark
                self._run_query(spark, checkpoint, model, is_repetition=position.is_unfinished)
                remove_older(checkpoint)
                lag = measure_lag(self.path, read_position(checkpoint))
        answers = self._write_results(spark, snapshots.latest(spark, self.path), self.counts.model or model)
        report = self.counts.report(snapshots.latest(spark, self.predictions), model, lag, answers)
        log_end(report)
        return report

    def _write_results(self, spark: SparkSession | None, table: TableRef, model: ModelRef) -> dict[str, Any]:
        csv = csv_file(self.predict.csv, self.storage)
        return table_results(spark, table, self.predictions, model, csv, self.storage)

    def _find(self, spark: SparkSession | None) -> tuple[TableRef, ModelRef]:
        """Return the newest version of the table, and the model version that now has the alias, checked for it."""
        table = snapshots.latest(spark, self.path)
        model = named_model(self.predict, self.promote, self.storage)
        model = model or model_of_table(table, self.predict, self.storage)
        pair = (table.model_copy(update={"version": 0}), model)
        if pair not in self.checked:
            check_model(model, table, self.predict, self.promote, self.storage)
            self.checked.add(pair)
        return table, model

    def _run_query(self, spark: SparkSession, checkpoint: str, model: ModelRef, *, is_repetition: bool) -> None:
        """Run the query to its end; if the table's columns change meanwhile, continue with another query."""
        start_workers(spark)
        check_file_visible(spark, self.path, "_delta_log", "predict.table" if self.predict.table else "storage.tables")
        check_visible(spark, self.predictions, predictions_setting(self.predict))
        written = snapshots.latest(spark, self.predictions)

        def process(changes: DataFrame) -> None:
            self._process_batch(changes, is_repetition=is_repetition and self.counts.batches == 0)
            if self.show is not None:
                counts = self.counts.copy()
                # The lag after the batch that the checkpoint has begun last.
                self.show(lambda: counts.report(written, model, measure_lag(self.path, read_begun(checkpoint))))

        stuck = 0
        while True:
            before = self.counts.batches
            try:
                rows = read_changes(spark, self.path, self.stream)
                run_query(rows, process, checkpoint, self.stream.interval_seconds)
                return
            except UserError:
                raise  # Its own sentence, which may name the table.
            except Exception as error:
                explained = explain_failure(text_of(error), self.path, checkpoint)
                if explained is None:
                    raise
                if not isinstance(explained, ColumnsChanged):
                    raise explained from error
                stuck = 1 if self.counts.batches > before else stuck + 1
                if stuck == MAX_STUCK:
                    raise WrongInput(
                        f"the columns of '{self.path}' are others than in the changes that the stream has not read yet",
                        way_out=RESTART,
                    ) from error
                logger.info("the columns of %s changed: reading it again", self.path)

    def _process_batch(self, changes: DataFrame, *, is_repetition: bool) -> None:
        """Predict the images of a batch of the change data feed, in one commit.

        A batch whose run was killed comes again. Its images that have a prediction are left out, and a batch without
        other images has no commit. The MERGE by key does not insert a row twice even if two drivers repeat a batch.
        Delta's own record of written batches (txnAppId and txnVersion) would not do more. It knows neither the rows of
        predict-batch nor those of an earlier checkpoint, and would skip a repeated batch whose alias has moved to
        another version.

        Args:
            changes: Rows of the change data feed.
            is_repetition: Whether an earlier run began the batch. It may have failed for its images, so those that were
                deleted since are left out; in other batches, that would cost a look at all images.

        Raises:
            WrongInput: More errors than `predict.max_error_fraction`, a missing sha256, or as `_find`.
            TableChanged: Another driver wrote to a table of predictions on a store.
            DiskFull: The disk is full; the batch was not written.
        """
        began, spark, counts = time.perf_counter(), changes.sparkSession, self.counts
        keys, num = changed_keys(changes), 0
        if keys.num_rows:  # A commit that changes no rows, such as compaction, gives a batch without any.
            with write_access(self.predictions, spark), translate_disk_full(self.predictions, self.storage.home):
                # Looked up once per batch, so that all rows of a batch are by one version.
                table, model = self._find(spark)
                counts.model = model
                predicted = predicted_by(spark, model, self.predictions, PREDICTED_ARROW, self.storage)
                images = None
                if is_repetition:
                    images = snapshots.version_rows(spark, table, SHA256_ARROW, scratch_root(self.storage))
                again = self.predict.retry_errors
                pending = pending_changes(keys, predicted, images, self.storage, retry_errors=again)
                if num := pending.images.num_rows:
                    self._predict_images(changes, pending, table, model)
        seconds = time.perf_counter() - began
        counts.add_batch(num, seconds)
        logger.info("batch of %d changes: %d images predicted in %.1f s", keys.num_rows, num, seconds)
        if num and self.stream.interval_seconds is not None:
            self.paced(lambda: self._write_results(spark, table, model))

    def _predict_images(self, changes: DataFrame, pending: PendingChanges, table: TableRef, model: ModelRef) -> None:
        sent = self.sent.send(changes.sparkSession, self.storage, model, self.predict)
        unlearned = unlearned_labels(pending.labels, sent.classes)
        warn_of_unlearned(tuple(sorted(unlearned - self.counts.unlearned)), table, model)
        self.counts.unlearned |= unlearned
        with counted("predict", pending.images.num_rows):
            rows = score(pending.contents(changes), sent, self.predict)
            self.counts.errors += write(rows, self.predictions, model, self.predict)
