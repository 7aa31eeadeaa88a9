"""The processing of one batch of files of a stream: those without a prediction are read, predicted and recorded."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tasks.config.prediction import PredictConfig
from tasks.predict.source import ListedSource
from tasks.predict.source_batch import predict_files
from tasks.predict.source_pending import pending_files
from tasks.refs import ModelRef
from tasks.schema import FILE_ARROW
from tasks.storage import Storage
from tasks.stream.counts import StreamCounts
from tasks.stream.listings import forget
from tasks.stream.micro_batch import ModelOnWorkers
from tasks.system.disk import translate_disk_full
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.stream")

FindModel = Callable[[SparkSession], ModelRef]
"""A function that returns the model version that now has the alias."""


@dataclass(frozen=True)
class FilePredictor:
    """A function of a streaming query that predicts the files of each batch.

    Predictions are committed before the rows of `inputs`. A batch whose run was killed comes again; its files that have
    both are left out, and the others are read again.

    Attributes:
        source: The source as it was listed by this run.
        inputs: Path or URL of the table `inputs`.
        predictions: Path or URL of the table of predictions.
        checkpoint: Folder or URL of the checkpoint.
        find: Looks up the model version.
        predict: Settings of inference.
        storage: Storage with the home and the models.
        counts: Results of the run.
        sent: The model on the workers.
    """

    source: ListedSource
    inputs: str
    predictions: str
    checkpoint: str
    find: FindModel
    predict: PredictConfig
    storage: Storage
    counts: StreamCounts
    sent: ModelOnWorkers = field(default_factory=ModelOnWorkers)

    def __call__(self, listed: DataFrame) -> None:
        """Process a batch, rows of FILE_ARROW.

        Raises:
            WrongInput: More errors than `predict.max_error_fraction`, or as `find`.
            TableChanged: Another driver wrote to a table on a store.
            DiskFull: The disk is full; the batch was not written.
        """
        began, spark, counts = time.perf_counter(), listed.sparkSession, self.counts
        part, num = listed.select("path").toArrow(), 0
        with write_access(self.predictions, spark), translate_disk_full(self.predictions, self.storage.home):
            # Looked up once per batch, so that all rows of a batch are by one version.
            counts.model = self.find(spark)
            present, absent = self._present(part)
            if absent:
                forget(absent, self.checkpoint, self.storage)
            if (files := self._pending(spark, present, counts.model)).num_rows:
                sent = self.sent.send(spark, self.storage, counts.model, self.predict)
                tables = self.inputs, self.predictions
                found = predict_files(spark, files, self.source, *tables, sent, self.predict)
                if found.vanished:
                    forget(found.vanished, self.checkpoint, self.storage)
                num = found.images
                counts.errors += found.errors
                counts.unreadable += found.unreadable
        counts.files += part.num_rows
        seconds = time.perf_counter() - began
        counts.add_batch(num, seconds)
        logger.info("batch of %d files: %d images predicted in %.1f s", part.num_rows, num, seconds)

    def _present(self, part: pa.Table) -> tuple[pa.Table, tuple[str, ...]]:
        """Return the files of the batch with their present size and time, and the paths of those that are gone."""
        with Relations(self.storage) as relations:
            relations.add("listing", self.source.listing)
            relations.add("part", part)
            present = relations.table("FROM listing SEMI JOIN part USING (path)", FILE_ARROW)
            absent = relations.rows("SELECT path FROM part ANTI JOIN listing USING (path)")
        return present, tuple(path for (path,) in absent)

    def _pending(self, spark: SparkSession, present: pa.Table, model: ModelRef) -> pa.Table:
        """Return the files of the batch without a prediction."""
        again = self.predict.retry_errors
        tables = self.inputs, self.predictions
        source = replace(self.source, listing=present)
        with pending_files(spark, source, *tables, model, self.storage, retry_errors=again, is_part=True) as pending:
            return pending.table()
