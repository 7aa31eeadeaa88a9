"""Streaming inference: the images that are added to a table are predicted by the champion, batch by batch."""

import logging
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.config.stream import StreamConfig
from tasks.errors import UserError, WrongInput
from tasks.predict.champion import check_model, model_of_table, named_model
from tasks.predict.pending import check_images
from tasks.predict.predictions import check_paths, create_predictions, predictions_setting
from tasks.predict.scoring import start_workers
from tasks.refs import ModelRef, StreamReport, TableRef
from tasks.spark.cluster import check_file_visible, check_visible
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage
from tasks.stream.changes import check_feed, read_changes
from tasks.stream.checkpoint import RESTART, checkpoint_root, open_checkpoint, read_begun, read_position, remove_older
from tasks.stream.counts import ShowProgress, StreamCounts, log_end
from tasks.stream.failures import ColumnsChanged, explain_failure
from tasks.stream.lag import measure_lag
from tasks.stream.micro_batch import BatchPredictor
from tasks.stream.query import run_query
from tasks.stream.source_stream import stream_source
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots

logger = logging.getLogger("lakevision.stream")

MAX_STUCK = 2
"""Number of starts of a query without a batch, after changes of the table's columns, that show that it is stuck."""


@dataclass(frozen=True)
class _Source:
    """The table of a stream, the table it writes to, and the lookup of its model."""

    path: str
    predictions: str
    predict: PredictConfig
    promote: PromoteConfig
    storage: Storage
    show: ShowProgress | None
    checked: set[tuple[TableRef, ModelRef]] = field(default_factory=set)
    """Models that were checked, with the source of their table: a warning is logged once, not for each batch."""

    def find_model(self, spark: SparkSession | None) -> tuple[TableRef, ModelRef]:
        """Return the newest version of the table, and the model version that now has the alias, checked for it."""
        table = snapshots.latest(spark, self.path)
        model = named_model(self.predict, self.promote, self.storage)
        model = model or model_of_table(table, self.predict, self.storage)
        named, given = self.predict.table is not None, self.promote.model_name is not None
        pair = (table.model_copy(update={"version": 0}), model)
        if pair not in self.checked:
            check_model(model, table, self.storage, table_is_named=named, name_is_given=given)
            self.checked.add(pair)
        return table, model


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
    check_paths(path, predictions, storage)
    source = _Source(path, predictions, predict, promote, storage, show)
    return try_without_spark(lambda spark: _run(spark, source, stream), config, storage)


def _run(spark: SparkSession | None, source: _Source, stream: StreamConfig) -> StreamReport:
    table, model = source.find_model(spark)
    images = snapshots.newest_snapshot(spark, source.path)
    assert images is not None, source.path
    check_images(images.schema.names, source.path)
    check_feed(images)
    root = checkpoint_root(
        source.predictions,
        "changes",
        table.table_id,
        create_predictions(spark, source.predictions),
        source.promote.model_name or "",
        source.predict.alias,
    )
    with exclusive_lock(root, spark):
        checkpoint = open_checkpoint(root, restart=stream.restart)
        counts = StreamCounts(model=model)
        position = read_position(checkpoint)
        lag = measure_lag(source.path, position)
        if stream.interval_seconds is not None or position.is_unfinished or lag.versions:
            if spark is None:
                raise NeedsSpark
            counts = _run_query(spark, source, stream, checkpoint, model, is_repetition=position.is_unfinished)
            remove_older(checkpoint)
            lag = measure_lag(source.path, read_position(checkpoint))
    report = counts.report(snapshots.latest(spark, source.predictions), model, lag)
    log_end(report)
    return report


def _run_query(
    spark: SparkSession,
    source: _Source,
    stream: StreamConfig,
    checkpoint: str,
    model: ModelRef,
    *,
    is_repetition: bool,
) -> StreamCounts:
    """Run the query to its end; if the table's columns change meanwhile, continue with another query."""
    predict = source.predict
    start_workers(spark)
    check_file_visible(spark, source.path, "_delta_log", "predict.table" if predict.table else "storage.tables")
    check_visible(spark, source.predictions, predictions_setting(predict))
    find = source.find_model
    predictor = BatchPredictor(source.predictions, find, predict, source.storage, is_repetition=is_repetition)
    written = snapshots.latest(spark, source.predictions)

    def process(changes: DataFrame) -> None:
        predictor(changes)
        if source.show is not None:
            source.show(partial(_report_so_far, predictor.counts.copy(), written, model, source.path, checkpoint))

    stuck = 0
    while True:
        before = predictor.counts.batches
        try:
            rows = read_changes(spark, source.path, stream)
            run_query(rows, process, checkpoint, stream.interval_seconds)
            return predictor.counts
        except UserError:
            raise  # Its own sentence, which may name the table.
        except Exception as error:
            explained = explain_failure(str(error), source.path, checkpoint)
            if explained is None:
                raise
            if not isinstance(explained, ColumnsChanged):
                raise explained from error
            stuck = 1 if predictor.counts.batches > before else stuck + 1
            if stuck == MAX_STUCK:
                raise WrongInput(
                    f"the columns of '{source.path}' are others than in the changes that the stream has not read yet: "
                    f"{RESTART}"
                ) from error
            logger.info("the columns of %s changed: reading it again", source.path)


def _report_so_far(
    counts: StreamCounts, predictions: TableRef, model: ModelRef, path: str, checkpoint: str
) -> StreamReport:
    """Return the report after the batch that the checkpoint has begun last."""
    return counts.report(predictions, model, measure_lag(path, read_begun(checkpoint)))
