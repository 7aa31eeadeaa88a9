"""Streaming inference on a folder or URL that grows: its new files are predicted by the champion, batch by batch."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig, StreamConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.etl.own_folders import OwnFolders
from tasks.etl.source import find_source
from tasks.object_store import list_names
from tasks.predict.champion import model_of_images, named_model
from tasks.predict.inputs import inputs_table, pending_files
from tasks.predict.predictions import check_paths, create_predictions, predictions_setting
from tasks.predict.scoring import start_workers
from tasks.predict.source import SETTING, ListedSource, list_source
from tasks.predict.source_batch import log_model, predict_files, source_results
from tasks.refs import ModelRef, StreamReport
from tasks.schema import FILE_ARROW, TO_PREDICT_ARROW
from tasks.spark.cluster import check_visible
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage
from tasks.stream.checkpoint import checkpoint_root, open_checkpoint, remove_older
from tasks.stream.processed_files import ProcessedFiles, age_of_oldest, batches_of
from tasks.stream.run import Lag, ModelOnWorkers, Paced, ShowProgress, StreamCounts, log_end
from tasks.system.disk import translate_disk_full
from tasks.system.locks import exclusive_lock
from tasks.tables import snapshots
from tasks.tables.writer import write_access

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
        TableInUse: Another driver writes to a table on a store that can have one writer only.
        DiskFull: The disk is full; the next run continues.
    """
    assert predict.source
    predictions = predict.predictions or storage.table("predictions")
    inputs = inputs_table(predictions)
    check_paths(inputs, predictions, predict, storage)
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
    paced: Paced = field(default_factory=Paced)
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
        with exclusive_lock(root, spark), translate_disk_full(self.predictions, self.storage.home):
            checkpoint = open_checkpoint(root, restart=self.stream.restart)
            processed = ProcessedFiles(checkpoint, self.storage)
            if spark is not None and not list_names(checkpoint):
                # Before the first batch: if that fails, a restart must not be forgotten.
                processed.add_batch(FILE_ARROW.empty_table(), [])
            processed.take_back_listings()
            has_processed, source = self._process_new(spark, processed)
            while self.stream.interval_seconds is not None:
                _sleep(self.stream.interval_seconds)
                _, source = self._process_new(spark, processed)
            lag = self._lag(processed) if has_processed else Lag(0, 0.0)
            answers = self._write_results(spark, source, self.counts.model or model)
        report = self.counts.report(snapshots.latest(spark, self.predictions), model, lag, answers)
        log_end(report)
        return report

    def _write_results(self, spark: SparkSession | None, source: ListedSource, model: ModelRef) -> dict[str, Any]:
        inputs = snapshots.newest_snapshot(spark, self.inputs)
        table = None if inputs is None else inputs.table
        return source_results(spark, source, table, self.predictions, model, self.predict, self.storage)

    def _find(self, spark: SparkSession | None) -> ModelRef:
        """Return the model version that now has the alias."""
        model = named_model(self.predict, self.promote, self.storage)
        model = model or model_of_images(self.predict, self.storage, spark)
        if model not in self.logged:
            log_model(model, str(self.location), self.storage)
            self.logged.add(model)
        return model

    def _process_new(self, spark: SparkSession | None, processed: ProcessedFiles) -> tuple[bool, ListedSource]:
        """Process the files that are new now, batch by batch; return whether there were any, and the listing.

        Raises:
            NeedsSpark: There are some, and `spark` is None; nothing was changed.
        """
        source, model = self._list(), self._find(spark)
        new = processed.new_files(source.listing)
        pending = self._pending(spark, replace(source, listing=new), model)
        vanished: list[str] = []
        if left := pending.num_rows:
            if spark is None:
                raise NeedsSpark
            seconds = age_of_oldest(pending, time.time())
            logger.info("%d files to process; the oldest is from %.0f s ago", left, seconds)
            start_workers(spark)
            check_visible(spark, self.predictions, predictions_setting(self.predict))
            written = snapshots.latest(spark, self.predictions)
            for files in batches_of(pending.select(FILE_ARROW.names), self.stream):
                gone = self._process_batch(spark, source, files)
                vanished += gone
                left -= files.num_rows
                if left:  # The last batch is recorded with the listing.
                    processed.add_batch(files, gone)
                if self.stream.interval_seconds is not None:
                    self.paced(lambda: self._write_results(spark, source, self.counts.model or model))
                lag = Lag(0, seconds if left else 0.0, left)
                if self.show is not None:
                    self.show(partial(self.counts.copy().report, written, model, lag))
        if new.num_rows:
            processed.replace(source.listing, vanished)
            remove_older(processed.checkpoint)
        return bool(pending.num_rows), source

    def _lag(self, processed: ProcessedFiles) -> Lag:
        """Return the lag after all files were processed: the files that came meanwhile."""
        came = processed.new_files(self._list().listing).table()
        return Lag(0, age_of_oldest(came, time.time()), came.num_rows)

    def _list(self) -> ListedSource:
        assert self.predict.source
        return list_source(self.predict.source, self.inputs, self.storage, self.config, may_be_empty=True, own=self.own)

    def _pending(self, spark: SparkSession | None, source: ListedSource, model: ModelRef) -> pa.Table:
        """Return the files (TO_PREDICT_ARROW) that have no prediction, such as by batch inference."""
        if not source.listing.num_rows:
            return TO_PREDICT_ARROW.empty_table()
        again, tables = self.predict.retry_errors, (self.inputs, self.predictions)
        files, _gone = pending_files(spark, source, *tables, model, self.storage, retry_errors=again, is_part=True)
        return files

    def _process_batch(self, spark: SparkSession, source: ListedSource, files: pa.Table) -> Sequence[str]:
        """Predict the files of a batch (FILE_ARROW) and commit it; return the paths of those that vanished.

        Raises:
            WrongInput: More errors than `predict.max_error_fraction`, or as `_find`.
            TableChanged: Another driver wrote to a table on a store.
            DiskFull: The disk is full; the batch was not written.
        """
        began, counts, num = time.perf_counter(), self.counts, 0
        vanished: Sequence[str] = ()
        with write_access(self.predictions, spark):
            # Looked up once per batch, so that all rows of a batch are by one version.
            counts.model = self._find(spark)
            # The batches before may have predicted the contents of known files, and other runs any file.
            pending = self._pending(spark, replace(source, listing=files), counts.model)
            if pending.num_rows:
                sent = self.sent.send(spark, self.storage, counts.model, self.predict)
                found = predict_files(spark, pending, source, self.inputs, self.predictions, sent, self.predict)
                num, vanished = found.images, found.vanished
                counts.errors += found.errors
                counts.unreadable += found.unreadable
        seconds = time.perf_counter() - began
        counts.add_batch(num, seconds)
        logger.info("batch of %d files: %d images predicted in %.1f s", files.num_rows, num, seconds)
        return vanished


def _sleep(seconds: float) -> None:
    """Sleep in short parts: the time limit of a run in a thread is raised between two of them."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))
