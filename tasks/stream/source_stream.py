"""Streaming inference on a folder or URL that grows: its new files are predicted by the champion, batch by batch."""

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.config.stream import StreamConfig
from tasks.etl.own_folders import OwnFolders
from tasks.etl.source import find_source
from tasks.predict.champion import model_of_images, named_model
from tasks.predict.inputs import inputs_table
from tasks.predict.predictions import check_paths, create_predictions, predictions_setting
from tasks.predict.scoring import start_workers
from tasks.predict.source import SETTING, ListedSource, list_source
from tasks.predict.source_batch import log_model
from tasks.predict.source_pending import pending_files
from tasks.refs import ModelRef, StreamReport
from tasks.schema import FILE_ARROW
from tasks.spark.cluster import check_visible
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage
from tasks.stream.checkpoint import checkpoint_root, open_checkpoint, read_position, remove_older
from tasks.stream.counts import ShowProgress, StreamCounts, log_end
from tasks.stream.failures import explain_checkpoint_failure
from tasks.stream.file_batch import FilePredictor
from tasks.stream.lag import Lag
from tasks.stream.listings import (
    age_of_oldest,
    hand_over,
    new_files,
    read_listings,
    remove_processed,
    waiting,
    waiting_names,
)
from tasks.stream.micro_batch import ModelOnWorkers
from tasks.stream.query import run_query
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots
from tasks.tables.parquet_rows import SpooledRows

logger = logging.getLogger("lakevision.stream")


def stream_source(
    stream: StreamConfig,
    predict: PredictConfig,
    promote: PromoteConfig,
    storage: Storage,
    config: SparkConfig,
    show: ShowProgress | None = None,
) -> StreamReport:
    """Predict the image files that were added to `predict.source` or changed since the last run.

    The first run predicts all files that have no prediction. Spark is not started for a local folder without new files.

    Args:
        stream: Settings of the stream.
        predict: Settings of inference, with the source.
        promote: Settings with the name of the registered model; without a name, the model of the table `images`.
        storage: Locations of tables and models.
        config: Settings of the Spark session.
        show: Called after each batch.

    Raises:
        WrongInput: The source or the model does not exist, or the checkpoint is damaged. A batch has too many errors.
        TableInUse: Another driver runs the same stream on a store.
        DiskFull: The disk is full; the next run continues.
    """
    assert predict.source
    predictions = predict.predictions or storage.table("predictions")
    inputs = inputs_table(predictions)
    check_paths(inputs, predictions, storage)
    location = find_source(predict.source, storage, SETTING)
    own = OwnFolders.of(location, storage, SETTING, predictions)
    run = _Run(location, inputs, predictions, stream, predict, promote, storage, config, show, own)
    return try_without_spark(run, config, storage)


@dataclass(frozen=True)
class _Run:
    """A run of the stream.

    The fields are as in `stream_source`, with the location of the source, two tables, and the folders to leave out.
    """

    location: Path | str
    inputs: str
    predictions: str
    stream: StreamConfig
    predict: PredictConfig
    promote: PromoteConfig
    storage: Storage
    config: SparkConfig
    show: ShowProgress | None
    own: OwnFolders
    counts: StreamCounts = field(default_factory=StreamCounts)
    sent: ModelOnWorkers = field(default_factory=ModelOnWorkers)
    logged: set[ModelRef] = field(default_factory=set)
    """Models that were logged with what they were trained on: once, and not for each batch."""

    def __call__(self, spark: SparkSession | None) -> StreamReport:
        """Run the stream, without a session if that is possible."""
        if spark is None and not isinstance(self.location, Path):
            raise NeedsSpark
        model = self._find(spark)
        given = self.promote.model_name or "", self.predict.alias
        table_id = create_predictions(spark, self.predictions)
        root = checkpoint_root(self.predictions, "files", str(self.location), table_id, *given)
        with exclusive_lock(root, spark):
            checkpoint = open_checkpoint(root, restart=self.stream.restart)
            has_processed = self._process_new(spark, checkpoint)
            while self.stream.interval_seconds is not None:
                _sleep(self.stream.interval_seconds)
                self._process_new(spark, checkpoint)
            lag = self._lag(checkpoint) if has_processed else Lag(0, 0.0)
        report = self.counts.report(snapshots.latest(spark, self.predictions), model, lag)
        log_end(report)
        return report

    def _find(self, spark: SparkSession | None) -> ModelRef:
        """Return the model version that now has the alias."""
        model = named_model(self.predict, self.promote, self.storage)
        model = model or model_of_images(self.predict, self.storage, spark)
        if model not in self.logged:
            log_model(model, str(self.location), self.storage)
            self.logged.add(model)
        return model

    def _process_new(self, spark: SparkSession | None, checkpoint: str) -> bool:
        """Process the files that are new now, and those that an earlier run left; return whether there were any.

        Raises:
            NeedsSpark: There are some, and `spark` is None; nothing was changed.
        """
        read_position(checkpoint)  # A damaged checkpoint is found before anything is written to it.
        source, model = self._list(), self._find(spark)
        listed = new_files(source.listing, checkpoint, self.storage)
        files = self._pending(spark, replace(source, listing=listed), model)
        left = waiting(checkpoint, time.time())
        num = left.files + files.num_rows
        if num and spark is None:
            raise NeedsSpark
        if listed.num_rows:
            with translate_disk_full(checkpoint, self.storage.home):
                hand_over(files, source.listing, checkpoint, self.stream, self.storage)
            remove_older(checkpoint)
        if spark is None or not num:
            return False
        seconds = max(left.seconds, age_of_oldest(files, time.time()))
        logger.info("%d files to process; the oldest is from %.0f s ago", num, seconds)
        self._run_query(spark, source, checkpoint, model, Lag(0, seconds, num))
        return True

    def _lag(self, checkpoint: str) -> Lag:
        """Return the lag after all files were processed: the files that came meanwhile."""
        came = new_files(self._list().listing, checkpoint, self.storage)
        files = came.table() if isinstance(came, SpooledRows) else came
        return Lag(0, age_of_oldest(files, time.time()), files.num_rows)

    def _list(self) -> ListedSource:
        assert self.predict.source
        return list_source(self.predict.source, self.inputs, self.storage, self.config, may_be_empty=True, own=self.own)

    def _pending(self, spark: SparkSession | None, source: ListedSource, model: ModelRef) -> pa.Table:
        """Return the files (FILE_ARROW) that have no prediction, such as by batch inference."""
        if not source.listing.num_rows:
            return FILE_ARROW.empty_table()
        again, tables = self.predict.retry_errors, (self.inputs, self.predictions)
        with pending_files(spark, source, *tables, model, self.storage, retry_errors=again, is_part=True) as pending:
            return pending.table().select(FILE_ARROW.names)

    def _run_query(
        self, spark: SparkSession, source: ListedSource, checkpoint: str, model: ModelRef, before: Lag
    ) -> None:
        """Process all listings that wait, a batch each."""
        start_workers(spark)
        check_visible(spark, self.predictions, predictions_setting(self.predict))
        tables = self.inputs, self.predictions
        names = waiting_names(checkpoint)
        predictor = FilePredictor(
            source, *tables, checkpoint, self._find, self.predict, self.storage, self.counts, self.sent
        )
        written, at_start = snapshots.latest(spark, self.predictions), self.counts.files

        def process(listed: DataFrame) -> None:
            predictor(listed)
            if self.show is not None:
                left = max(0, before.files - (self.counts.files - at_start))
                lag = Lag(0, before.seconds if left else 0.0, left)
                self.show(partial(self.counts.copy().report, written, model, lag))

        try:
            run_query(read_listings(spark, checkpoint), process, checkpoint, None)
        except Exception as error:
            explained = explain_checkpoint_failure(str(error), checkpoint)
            if explained is None:
                raise
            raise explained from error
        remove_processed(checkpoint, names)  # Not those that another driver has handed over meanwhile.


def _sleep(seconds: float) -> None:
    """Sleep in short parts: the time limit of a run in a thread is raised between two of them."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))
