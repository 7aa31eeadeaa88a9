"""Streaming inference: the images that are added to a table are predicted by the champion, batch by batch."""

import logging
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.config.stream import StreamConfig
from tasks.errors import WrongInput
from tasks.predict.champion import check_model, model_of_table, named_model
from tasks.predict.pending import check_images, check_predictions
from tasks.refs import ModelRef, StreamReport, TableRef
from tasks.schema import PREDICTIONS, PREDICTIONS_PROPERTIES
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.spark.visible_folders import check_file_visible, check_visible
from tasks.storage import Storage
from tasks.stream.changes import check_feed, read_changes
from tasks.stream.checkpoint import RESTART, checkpoint_root, open_checkpoint, read_position, remove_older
from tasks.stream.failures import ColumnsChanged, explain_failure
from tasks.stream.lag import Lag, measure_lag
from tasks.stream.micro_batch import BatchPredictor, StreamCounts
from tasks.stream.query import run_query
from tasks.system.disk import check_writable
from tasks.system.locks import exclusive_lock
from tasks.tables import delta, snapshots
from tasks.tables.writer import write_access

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
    stream: StreamConfig, predict: PredictConfig, promote: PromoteConfig, storage: Storage, config: SparkConfig
) -> StreamReport:
    """Predict the images that were added to a table since the last run, and merge the result into `predictions`.

    The first run predicts the images that are there. Spark is not started if the table has no changes.

    Args:
        stream: Settings of the stream.
        predict: Settings of inference.
        promote: Settings with the name of the registered model; without a name, the model trained from the table.
        storage: Locations of tables and models.
        config: Settings of the Spark session.

    Raises:
        WrongInput: The model, alias or table does not exist, or the table has no change data feed or lacks columns. The
            changes to read were deleted, or the checkpoint is damaged. A batch has too many errors.
        TableInUse: Another driver runs the same stream on a store.
        DiskFull: The disk is full; the next run continues.
    """
    path = predict.table or storage.table("images")
    predictions = predict.predictions or storage.table("predictions")
    delta.check_table_path(path)
    delta.check_table_path(predictions)
    check_writable(storage.home, "storage.home")
    check_writable(predictions, "predict.predictions")
    source = _Source(path, predictions, predict, promote, storage)
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
        _table_id(spark, source.predictions),
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
            counts = _run_query(spark, source, stream, checkpoint, is_repetition=position.is_unfinished)
            remove_older(checkpoint)
            lag = measure_lag(source.path, read_position(checkpoint))
    return _report(snapshots.latest(spark, source.predictions), counts, model, lag)


def _table_id(spark: SparkSession | None, path: str) -> str:
    """Return the id of the table of predictions, which is created without rows if it is missing.

    The id is a part of the checkpoint's name: a stream whose predictions were removed begins again.
    """
    with write_access(path, spark):
        newest = snapshots.newest_snapshot(spark, path)
        if newest is None:
            if spark is None:
                raise NeedsSpark
            delta.create_table(path, spark.createDataFrame([], PREDICTIONS), PREDICTIONS_PROPERTIES)
            return snapshots.latest(spark, path).table_id
        check_predictions(newest.schema, path)
        return newest.table.table_id


def _run_query(
    spark: SparkSession, source: _Source, stream: StreamConfig, checkpoint: str, *, is_repetition: bool
) -> StreamCounts:
    """Run the query to its end; if the table's columns change meanwhile, continue with another query."""
    predict = source.predict
    check_file_visible(spark, source.path, "_delta_log", "predict.table" if predict.table else "storage.tables")
    check_visible(spark, source.predictions, "predict.predictions" if predict.predictions else "storage.tables")
    find = source.find_model
    predictor = BatchPredictor(source.predictions, find, predict, source.storage, is_repetition=is_repetition)
    stuck = 0
    while True:
        before = predictor.counts.batches
        try:
            rows = read_changes(spark, source.path, stream)
            run_query(rows, predictor, checkpoint, stream.interval_seconds)
            return predictor.counts
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


def _report(predictions: TableRef, counts: StreamCounts, model: ModelRef, lag: Lag) -> StreamReport:
    logger.info(
        "%d images predicted in %d batches, %d of them with an error; %d versions behind",
        counts.predicted, counts.batches, counts.errors, lag.versions,
    )  # fmt: skip
    return StreamReport(
        predictions=predictions,
        model=counts.model or model,
        batches=counts.batches,
        predicted=counts.predicted,
        errors=counts.errors,
        seconds=counts.seconds,
        versions_behind=lag.versions,
        seconds_behind=lag.seconds,
        unlearned=tuple(sorted(counts.unlearned)),
    )
