"""Predictions by Spark's workers: the iterator pandas UDF, and the model package that it loads."""

import os
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pandas as pd
from pyspark import Accumulator, SparkFiles
from pyspark.sql import Column, SparkSession
from pyspark.sql.pandas.functions import pandas_udf

from tasks.model.package import read_classes
from tasks.predict.champion import fetch_classifier
from tasks.refs import ModelRef
from tasks.schema import PREDICTION
from tasks.spark.cluster import task_threads
from tasks.spark.progress import EndedParts
from tasks.spark.worker_log import WorkerCount, log_from_worker
from tasks.storage import Storage


def make_predictor(
    package: str, batch_size: int, num_threads: int | None, ended: Accumulator[EndedParts] | None = None
) -> Callable[[str], Column]:
    """Return the iterator pandas UDF, which maps encoded images to structs of PREDICTION.

    Args:
        package: Name of the folder into which executors unpack the model package.
        batch_size: Number of images per forward pass.
        num_threads: Number of compute threads per Python worker; None for the cores that Spark reserves for a task.
        ended: Accumulator of the tasks that ended.
    """
    driver = os.getpid()

    def predict(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        import torch

        from tasks.model.classifier import ImageClassifier

        count = WorkerCount("predict", driver, ended)

        # Spark already runs one worker per core: more threads would oversubscribe the cores.
        torch.set_num_threads(num_threads or task_threads())
        began = time.perf_counter()
        model = ImageClassifier.load(Path(SparkFiles.get(package)))
        log_from_worker(f"model loaded in {time.perf_counter() - began:.1f} s")
        for contents in batches:
            parts = [
                model.predict_frame(contents.iloc[begin : begin + batch_size])
                for begin in range(0, len(contents), batch_size)
            ]
            count.add(len(contents))
            yield pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=PREDICTION.names)
        count.close()

    predictor: Callable[[str], Column] = pandas_udf(predict, PREDICTION)  # type: ignore[call-overload]  # PySpark's overloads lack it
    return predictor


def send_package(spark: SparkSession, storage: Storage, model: ModelRef) -> tuple[str, tuple[str, ...]]:
    """Send the model package to every executor, none of which needs the registry.

    Returns:
        The name of its folder there, and the classes of the model.
    """
    # Independent of the registry: a name with slashes would lead out of the workers' folder.
    name = f"model-{uuid4().hex}"
    # The driver serves the archive as long as the session: an executor that starts later fetches it, too.
    archive = Path(spark.sparkContext._temp_dir) / f"{name}.zip"
    with TemporaryDirectory(prefix="lakevision-model-") as scratch:
        folder = fetch_classifier(storage, model, Path(scratch) / name)
        classes = read_classes(folder)
        # One archive, since a cluster refuses a folder. Uncompressed, since weights do not compress.
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
            for file in sorted(folder.rglob("*")):
                packed.write(file, file.relative_to(folder))
    # A URI: Spark would take a number sign, a space or a percent sign in the home's path for a part of one.
    spark.sparkContext.addArchive(f"{archive.as_uri()}#{name}")
    return name, classes
