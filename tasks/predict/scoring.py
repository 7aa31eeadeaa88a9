"""Predictions by Spark's workers, and the model that is sent to them: its package and its classes."""

import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pandas as pd
from pyspark import Accumulator, SparkFiles
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf

from tasks.config.prediction import PredictConfig
from tasks.errors import WrongInput, join_names
from tasks.model_package.description import check_unknown, check_unsure, read_classes
from tasks.predict.champion import NUM_NAMED, translate_invalid
from tasks.refs import ModelRef, TableRef
from tasks.schema import PREDICTION, PREDICTIONS
from tasks.spark.cluster import is_in_driver, num_task_slots, threads_per_task
from tasks.spark.session import preload
from tasks.spark.worker_log import EndedParts, WorkerCount, count_ended_tasks
from tasks.storage import Storage
from tasks.tables import delta
from tasks.text.forms import as_known
from tasks.tracking.classifier_files import fetch_registered

logger = logging.getLogger("lakevision.predict")

SENT_IMAGES = 500
"""Images per core up to which they are sent to all cores evenly; more are predicted where they are read."""


@dataclass(frozen=True)
class SentModel:
    """A model package on all executors.

    Attributes:
        package: Name of its folder there.
        model: The registered version.
        classes: Names of its classes.
    """

    package: str
    model: ModelRef
    classes: tuple[str, ...]


def start_workers(spark: SparkSession) -> None:
    """Start the workers that predict, before `score` and beside other work: torch takes seconds to import."""
    preload(spark, "tasks.predict.predictor")


def score(images: DataFrame, sent: SentModel, predict: PredictConfig) -> DataFrame:
    """Return the predictions of images, rows of PREDICTIONS.

    They are computed when the frame is evaluated, and again each time it is: persist it.

    Args:
        images: Columns sha256 (string) and content (binary, an encoded image).
        sent: The model.
        predict: Settings of inference.
    """
    return prediction_rows(with_predictions(images.select("sha256", "content"), sent, predict), sent.model)


def spread(images: DataFrame, num: int) -> DataFrame:
    """Return images for inference; contents stay in the task that reads them.

    A few images are often in a single file, and one task would predict all of them: these are sent to all cores.

    Args:
        images: Rows with images.
        num: Their number.
    """
    slots = num_task_slots(images.sparkSession)
    return images.repartition(slots) if num <= SENT_IMAGES * slots else images


def with_predictions(images: DataFrame, sent: SentModel, predict: PredictConfig) -> DataFrame:
    """Return the columns of `images`, a digest instead of content, and the prediction as a struct; as `score`."""
    spark = images.sparkSession
    predictor = make_predictor(sent.package, predict, threads_per_task(spark), count_ended_tasks(spark.sparkContext))
    kept = [name for name in images.columns if name != "content"]
    digest = F.sha2("content", 256).alias("content_sha256")
    return images.select(*kept, digest, predictor("content").alias("prediction"))


def make_predictor(
    package: str, predict: PredictConfig, num_threads: int | None, ended: Accumulator[EndedParts] | None = None
) -> Callable[[str], Column]:
    """Return the iterator pandas UDF, which maps encoded images to structs of PREDICTION.

    Args:
        package: Name of the folder into which executors unpack the model package.
        predict: Settings of inference.
        num_threads: Number of compute threads per Python worker; None for the cores that Spark reserves for a task.
        ended: Accumulator of the tasks that ended.
    """
    driver = os.getpid()
    given = predict.top_k, predict.min_probability, predict.unknown_rate
    settings = package, predict.batch_size, given, num_threads

    def predict_on_worker(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        from tasks.predict.predictor import predict_batches  # torch: seconds

        yield from predict_batches(batches, *settings, WorkerCount("predict", driver, ended))

    predictor: Callable[[str], Column] = pandas_udf(predict_on_worker, PREDICTION)  # type: ignore[call-overload]  # PySpark's overloads lack it
    return predictor


def prediction_rows(predicted: DataFrame, model: ModelRef) -> DataFrame:
    """Return the rows of PREDICTIONS of the columns sha256, content_sha256 and prediction."""
    rows = predicted.select(
        "sha256",
        F.lit(model.name).alias("model_name"),
        F.lit(model.version).alias("model_version"),
        "prediction.*",
        "content_sha256",
        # A constant: Spark takes two queries with current_timestamp() for different ones, and would predict again.
        F.lit(datetime.now(UTC)).alias("predicted_at"),
    )
    return delta.with_schema(rows, PREDICTIONS)


def check_settings(predict: PredictConfig, classes: Collection[str], thresholds: Sequence[float] | None = ()) -> None:
    """Check that a model with these classes and thresholds can predict with the settings.

    Raises:
        WrongInput: `predict.min_probability` or `predict.unknown_rate` needs a label that is a class of the model, or
            as `check_unknown`.
    """
    setting = "predict.min_probability"
    try:
        check_unsure(predict.min_probability, classes)
        setting = "predict.unknown_rate"
        check_unknown(predict.unknown_rate, classes, thresholds)
    except ValueError as error:
        raise WrongInput.complete(f"predict.{error}", setting=setting, way_out="give 0") from None


def send_package(spark: SparkSession, storage: Storage, model: ModelRef, predict: PredictConfig) -> SentModel:
    """Send the model package to every executor, none of which needs the registry.

    Raises:
        WrongInput: The package is invalid, or as `check_settings`.
    """
    # Independent of the registry: a name with slashes would lead out of the workers' folder.
    name = f"model-{uuid4().hex}"
    with TemporaryDirectory(prefix="lakevision-model-") as scratch:
        with translate_invalid():
            folder = fetch_registered(storage, model, Path(scratch) / name)
            described = read_classes(folder)
        check_settings(predict, described.classes, described.unknown_thresholds)
        master = str(spark.sparkContext.master)
        if is_in_driver(master):
            # Where workers look for it. As an archive, a task that runs meanwhile would unpack it there as well.
            shutil.copytree(folder, Path(SparkFiles.getRootDirectory()) / name)
        else:
            _add_archive(spark, folder)
    return SentModel(name, model, described.classes)


def unlearned_labels(labels: Iterable[str], classes: Collection[str]) -> set[str]:
    """Return the labels that are not classes of a model; a label in another form of Unicode is the same."""
    form_of = as_known(set(classes))
    return {label for label in labels if form_of(label) not in classes}


def warn_of_unlearned(labels: tuple[str, ...], table: TableRef, model: ModelRef) -> None:
    """Warn of labels of the table that the model cannot predict."""
    if labels:
        logger.warning(
            "%s version %d was trained without %s of '%s', so that it gives their images other labels: train again",
            model.name, model.version, join_names(list(labels[:NUM_NAMED]), len(labels)), table.path,
        )  # fmt: skip


def _add_archive(spark: SparkSession, folder: Path) -> None:
    """Send a folder to every executor, which unpacks it under the folder's name."""
    # The driver serves the archive as long as the session: an executor that starts later fetches it, too.
    archive = Path(spark.sparkContext._temp_dir) / f"{folder.name}.zip"
    # One archive, since a cluster refuses a folder. Uncompressed, since weights do not compress.
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
        for file in sorted(folder.rglob("*")):
            packed.write(file, file.relative_to(folder))
    # A URI: Spark would take a number sign, a space or a percent sign in the home's path for a part of one.
    spark.sparkContext.addArchive(f"{archive.as_uri()}#{folder.name}")
