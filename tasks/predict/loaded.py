"""The classifier of a Python worker, which Spark reuses for many tasks: the model is loaded once."""

import time
from functools import lru_cache
from pathlib import Path

import torch
from pyspark import SparkFiles

from tasks.model_package.classifier import ImageClassifier
from tasks.predict.invalid_package import translate_invalid
from tasks.spark.cluster import task_gpu
from tasks.spark.worker_log import log_from_worker


def load_once(package: str) -> ImageClassifier:
    """Return the classifier in the folder that executors unpacked under this name, loaded at the first call.

    On a machine with GPUs it is on that of the current task.

    Raises:
        WrongInput: The model package is invalid.
    """
    num_gpus = torch.cuda.device_count()
    return _load(package, f"cuda:{task_gpu(num_gpus)}" if num_gpus else "cpu")


@lru_cache(maxsize=1)  # A worker of a long session predicts with one model after the other.
def _load(package: str, device: str) -> ImageClassifier:
    began = time.perf_counter()
    with translate_invalid():
        classifier = ImageClassifier.load(Path(SparkFiles.get(package)), torch.device(device))
    log_from_worker(f"model loaded on {device} in {time.perf_counter() - began:.1f} s")
    return classifier
