"""The iterator pandas UDF of inference, as Spark's Python workers run it.

Workers import this module: it has neither MLflow nor torch, of which the former is never needed there.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd
from pyspark import Accumulator
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf

from tasks.config.prediction import PredictConfig
from tasks.schema import PREDICTION
from tasks.spark.cluster import task_threads
from tasks.spark.worker_log import EndedParts, WorkerCount

if TYPE_CHECKING:
    from tasks.model_package.classifier import Prediction  # torch: seconds


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
