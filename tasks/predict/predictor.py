"""Inference in Spark's Python workers, which load the model once per process.

Executors import this module and no settings, tables or MLflow: only what decodes, computes and counts.
"""

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pandas as pd
import torch
from pyspark import SparkFiles, TaskContext

from tasks.model_package.classifier import ImageClassifier, Prediction
from tasks.spark.worker_log import WorkerCount, log_from_worker


def predict_batches(
    batches: Iterator[pd.Series],
    package: str,
    size: int,
    settings: tuple[int, float, float],
    num_threads: int | None,
    count: WorkerCount,
) -> Iterator[pd.DataFrame]:
    """Yield the columns of PREDICTION for each batch of encoded images.

    Args:
        batches: The images.
        package: Name of the folder into which executors unpacked the model package.
        size: Number of images that are predicted at once.
        settings: `top_k`, `min_probability` and `unknown_rate` of `ImageClassifier.predict`.
        num_threads: Number of compute threads; None for the cores that Spark reserves for the task.
        count: Counter of the task's images.

    Raises:
        InvalidPackage: As `ImageClassifier.load`.
    """
    # Spark already runs one worker per core: more threads would oversubscribe the cores.
    torch.set_num_threads(num_threads or task_threads())
    # A broken driver may count GPUs that nothing can be computed on.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    model = load_once(package, f"cuda:{task_gpu(num_gpus)}" if num_gpus else "cpu")
    for contents in batches:
        images = list(contents)
        found = [
            prediction
            for begin in range(0, len(images), size)
            for prediction in model.predict(images[begin : begin + size], *settings)
        ]
        count.add(len(contents))
        yield prediction_columns(found, model.precision)
    count.close()


@lru_cache(maxsize=1)  # A worker of a long session predicts with one model after the other.
def load_once(package: str, device: str) -> ImageClassifier:
    """Return the classifier in the folder that executors unpacked under this name, loaded at the first call."""
    began = time.perf_counter()
    classifier = ImageClassifier.load(Path(SparkFiles.get(package)), torch.device(device))
    log_from_worker(f"model loaded on {device} in {time.perf_counter() - began:.1f} s")
    return classifier


def prediction_columns(predictions: Sequence[Prediction], precision: str) -> pd.DataFrame:
    """Return predictions as the columns of PREDICTION, in its order; a missing value is null.

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
            "unknown_score": [found.unknown_score for found in predictions],
        }
    )


def task_gpu(num_gpus: int) -> int:
    """Return the number of the GPU of the current task, in its Python worker.

    Args:
        num_gpus: Number of GPUs that the worker sees, at least 1.
    """
    task = TaskContext.get()
    if task is None:
        return 0
    assigned = task.resources().get("gpu")
    if assigned is None:
        # Without spark.task.resource.gpu.amount, Spark assigns none: the tasks share all of them.
        return task.partitionId() % num_gpus
    address = assigned.addresses[0]
    # A cluster that shows the executor only its own GPUs numbers them anew, and their names are not numbers everywhere.
    return int(address) % num_gpus if address.isdecimal() else 0


def task_threads() -> int:
    """Return the number of cores that Spark reserved for the current task (spark.task.cpus), in its Python worker."""
    task = TaskContext.get()
    return 1 if task is None else task.cpus()
