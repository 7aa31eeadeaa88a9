"""The state of a run of a stream: the model on the workers, the results of the batches, and the report with the lag."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig
from tasks.predict.scoring import SentModel, send_package
from tasks.refs import ModelRef, StreamReport, TableRef
from tasks.storage import Storage

logger = logging.getLogger("lakevision.stream")

ShowProgress = Callable[[Callable[[], StreamReport]], None]
"""A function that is called after each batch with a function that returns the report of the run so far."""


@dataclass
class ModelOnWorkers:
    """The model version that was sent to the workers last: the next batches use it until the alias moves.

    Attributes:
        sent: The model; None before the first batch.
    """

    sent: SentModel | None = None

    def send(self, spark: SparkSession, storage: Storage, model: ModelRef, predict: PredictConfig) -> SentModel:
        """Return a model version on the workers, to which it is sent unless it was the last one.

        Raises:
            WrongInput: As `send_package`.
        """
        if self.sent is None or self.sent.model != model:
            self.sent = send_package(spark, storage, model, predict)
            logger.info("the stream predicts with %s version %d", model.name, model.version)
        return self.sent


@dataclass
class Paced:
    """Repeated work beside the batches of a stream, left out where it would take more than a tenth of the time.

    Attributes:
        due_at: Time from which on it is done again, of `time.monotonic`.
    """

    due_at: float = 0.0

    def __call__(self, work: Callable[[], object]) -> None:
        """Do the work if it is due."""
        began = time.monotonic()
        if began >= self.due_at:
            work()
            ended = time.monotonic()
            self.due_at = ended + 9 * (ended - began)


@dataclass(frozen=True)
class Lag:
    """The part of a table, or of a folder or URL, that a stream has not processed yet.

    Attributes:
        versions: Number of versions of a table that change rows.
        seconds: Age of the oldest of them, or of the file that was changed first, in seconds.
        files: Number of files of a folder or URL.
    """

    versions: int
    seconds: float
    files: int = 0


@dataclass
class StreamCounts:
    """Results of the batches of a run so far.

    Attributes:
        batches: Number of batches that were processed.
        predicted: Number of images that were predicted.
        errors: Number of these that have an error.
        unreadable: Number of files that could not be read.
        seconds: Wall time of the batches.
        model: Model version of the last batch.
        unlearned: Labels of the images that were predicted that are not classes of the model.
    """

    batches: int = 0
    predicted: int = 0
    errors: int = 0
    unreadable: int = 0
    seconds: float = 0.0
    model: ModelRef | None = None
    unlearned: set[str] = field(default_factory=set)

    def add_batch(self, predicted: int, seconds: float) -> None:
        """Count a batch that was processed."""
        self.batches += 1
        self.predicted += predicted
        self.seconds += seconds

    def copy(self) -> "StreamCounts":
        """Return the results so far, which later batches do not change."""
        return replace(self, unlearned=set(self.unlearned))

    def report(
        self, predictions: TableRef, model: ModelRef, lag: Lag, answers: Mapping[str, Any] | None = None
    ) -> StreamReport:
        """Return the report of a run.

        Args:
            predictions: The table of predictions.
            model: The model version at the start of the run.
            lag: The lag of the stream.
            answers: Fields of `Answers`; None while the stream runs.
        """
        return StreamReport(
            predictions=predictions,
            versions_behind=lag.versions,
            files_behind=lag.files,
            seconds_behind=lag.seconds,
            **(answers or {}),
            **vars(self) | {"model": self.model or model, "unlearned": tuple(sorted(self.unlearned))},
        )


def log_end(report: StreamReport) -> None:
    """Log the result of a run."""
    counted = [(report.versions_behind, "versions"), (report.files_behind, "files")]
    behind = ", ".join(f"{num} {unit}" for num, unit in counted if num) or "nothing"
    logger.info(
        "%d images predicted in %d batches, %d of them with an error; %d files cannot be read, %s behind",
        report.predicted, report.batches, report.errors, report.unreadable, behind,
    )  # fmt: skip
