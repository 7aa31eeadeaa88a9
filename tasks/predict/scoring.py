"""Predictions by Spark's workers: the iterator pandas UDF, and the model package that it loads."""

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from uuid import uuid4

import pandas as pd
from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf

from tasks.config.prediction import PredictConfig
from tasks.errors import WrongInput
from tasks.model_package.description import check_unsure, read_classes
from tasks.predict.champion import fetch_classifier, translate_invalid
from tasks.refs import ModelRef
from tasks.schema import PREDICTION, PREDICTIONS
from tasks.spark.cluster import task_threads, threads_per_task
from tasks.spark.progress import EndedParts, count_ended_tasks
from tasks.spark.worker_log import WorkerCount
from tasks.storage import Storage
from tasks.tables import delta

if TYPE_CHECKING:
    from tasks.model_package.classifier import Prediction  # torch: seconds


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


def score(images: DataFrame, sent: SentModel, predict: PredictConfig) -> DataFrame:
    """Return the predictions of images, rows of PREDICTIONS.

    They are computed when the frame is evaluated, and again each time it is: persist it.

    Args:
        images: Columns sha256 (string) and content (binary, an encoded image).
        sent: The model.
        predict: Settings of inference.
    """
    return prediction_rows(with_predictions(images.select("sha256", "content"), sent, predict), sent.model)


def with_predictions(images: DataFrame, sent: SentModel, predict: PredictConfig) -> DataFrame:
    """Return the columns of `images` without content, and the prediction of each as a struct; as `score`."""
    spark = images.sparkSession
    predictor = make_predictor(sent.package, predict, threads_per_task(spark), count_ended_tasks(spark.sparkContext))
    kept = [name for name in images.columns if name != "content"]
    return images.select(*kept, predictor("content").alias("prediction"))


def prediction_rows(predicted: DataFrame, model: ModelRef) -> DataFrame:
    """Return the rows of PREDICTIONS of the columns sha256 and prediction."""
    rows = predicted.select(
        "sha256",
        F.lit(model.name).alias("model_name"),
        F.lit(model.version).alias("model_version"),
        "prediction.*",
        # A constant: Spark takes two queries with current_timestamp() for different ones, and would predict again.
        F.lit(datetime.now(UTC)).alias("predicted_at"),
    )
    return delta.with_schema(rows, PREDICTIONS)


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
    driver, size, top_k, min_probability = os.getpid(), predict.batch_size, predict.top_k, predict.min_probability

    def predict_batches(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        import torch

        from tasks.predict.loaded import load_once

        count = WorkerCount("predict", driver, ended)

        # Spark already runs one worker per core: more threads would oversubscribe the cores.
        torch.set_num_threads(num_threads or task_threads())
        model = load_once(package)
        for contents in batches:
            images = list(contents)
            found = [
                prediction
                for begin in range(0, len(images), size)
                for prediction in model.predict(images[begin : begin + size], top_k, min_probability)
            ]
            count.add(len(contents))
            yield prediction_columns(found, model.precision)
        count.close()

    predictor: Callable[[str], Column] = pandas_udf(predict_batches, PREDICTION)  # type: ignore[call-overload]  # PySpark's overloads lack it
    return predictor


def prediction_columns(predictions: Sequence["Prediction"], precision: str) -> pd.DataFrame:
    """Return predictions as the columns of PREDICTION; a missing value is null.

    Args:
        predictions: The predictions of N images.
        precision: Precision of the computation.
    """
    return pd.DataFrame(
        {
            "label": [found.label for found in predictions],
            "probability": [found.probability for found in predictions],
            "error": [found.error for found in predictions],
            "index": pd.array([found.index for found in predictions], dtype="Int32"),
            "top_labels": [list(found.top_labels) for found in predictions],
            "top_probabilities": [list(found.top_probabilities) for found in predictions],
            "precision": precision,
        },
        columns=PREDICTION.names,
    )


def send_package(spark: SparkSession, storage: Storage, model: ModelRef, predict: PredictConfig) -> SentModel:
    """Send the model package to every executor, none of which needs the registry.

    Raises:
        WrongInput: The package is invalid, or `predict.min_probability` needs a label that is a class of the model.
    """
    # Independent of the registry: a name with slashes would lead out of the workers' folder.
    name = f"model-{uuid4().hex}"
    # The driver serves the archive as long as the session: an executor that starts later fetches it, too.
    archive = Path(spark.sparkContext._temp_dir) / f"{name}.zip"
    with TemporaryDirectory(prefix="lakevision-model-") as scratch, translate_invalid():
        folder = fetch_classifier(storage, model, Path(scratch) / name)
        classes = read_classes(folder)
        try:
            check_unsure(predict.min_probability, classes)
        except ValueError as error:
            raise WrongInput(f"predict.{error}") from None
        # One archive, since a cluster refuses a folder. Uncompressed, since weights do not compress.
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
            for file in sorted(folder.rglob("*")):
                packed.write(file, file.relative_to(folder))
    # A URI: Spark would take a number sign, a space or a percent sign in the home's path for a part of one.
    spark.sparkContext.addArchive(f"{archive.as_uri()}#{name}")
    return SentModel(name, model, classes)
