"""Batch inference: a Spark iterator pandas UDF decodes and predicts the images without a prediction."""

import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pandas as pd
from pyspark import Accumulator, SparkFiles
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.predict.champion import check_model, check_promoted, fetch_classifier, model_of_table, named_model
from tasks.predict.least_confident import least_confident
from tasks.predict.pending import PendingImages, pending_images
from tasks.progress.count import counted
from tasks.refs import ModelRef, PredictReport, TableRef
from tasks.schema import PREDICTION, PREDICTIONS, PREDICTIONS_KEY
from tasks.spark.cluster import num_task_slots, task_threads, threads_per_task
from tasks.spark.progress import EndedParts, count_ended_tasks, num_tasks
from tasks.spark.session import BROADCAST_ROWS, NeedsSpark, try_without_spark
from tasks.spark.visible_folders import check_file_visible, check_visible
from tasks.spark.worker_log import WorkerCount, log_from_worker
from tasks.storage import Storage
from tasks.system.disk import check_writable, translate_disk_full
from tasks.tables import delta, snapshots
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.predict")

MIN_PARTS_PER_CORE = 4
"""Partitions of a table per core from which its images are predicted where they are read."""


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


def check_images(columns: Iterable[str], path: str) -> None:
    """Check that a table has the columns that inference reads.

    Raises:
        WrongInput: Columns are missing; the message names them.
    """
    missing = sorted({"sha256", "content"} - set(columns))
    if missing:
        raise WrongInput(
            f"predict.table is '{path}', which has no column {', '.join(missing)}: "
            "give a table with sha256 (string) and content (binary, an encoded image)"
        )


def predict_batch(
    predict: PredictConfig,
    promote: PromoteConfig,
    storage: Storage,
    config: SparkConfig,
    table: TableRef | None = None,
    model: ModelRef | None = None,
) -> PredictReport:
    """Predict every image without a prediction by this model version, and merge the result into `predictions`.

    Spark is not started if every image has a prediction.

    Args:
        predict: Settings of inference.
        promote: Settings with the name of the registered model; without a name, the model trained from the table.
        storage: Locations of tables and models.
        config: Settings of the Spark session.
        table: Table version to predict on; None means the latest of `predict.table`.
        model: Model version that was promoted for the table; None means the version with the alias.

    Raises:
        WrongInput: The model, alias or table does not exist, or the table lacks columns. The model was trained on
            another table, or its files differ from the registered ones. The predictions cannot be written.
        DiskFull: The disk is full; the table is unchanged.
    """
    chosen = model or named_model(predict, promote, storage)
    path = predict.table or storage.table("images")
    predictions = predict.predictions or storage.table("predictions")
    delta.check_table_path(path)
    delta.check_table_path(predictions)
    check_writable(storage.home, "storage.home")
    check_writable(predictions, "predict.predictions")

    def run(spark: SparkSession | None) -> PredictReport:
        with write_access(predictions, spark), translate_disk_full(predictions, storage.home):
            images = table or snapshots.latest(spark, path)
            version = chosen or model_of_table(images, predict, storage)
            if model is not None and predict.table is None:
                # Returned by the promotion for this table; it may be the champion of a table with the same images.
                check_promoted(version, storage)
            else:
                named, given = predict.table is not None, promote.model_name is not None
                check_model(version, images, storage, table_is_named=named, name_is_given=given)
            return _predict(spark, images, predictions, version, predict, storage)

    return try_without_spark(run, config, storage)


def _predict(
    spark: SparkSession | None,
    table: TableRef,
    predictions: str,
    model: ModelRef,
    predict: PredictConfig,
    storage: Storage,
) -> PredictReport:
    check_images(snapshots.columns_of(spark, table), table.path)
    errors, seconds = 0, 0.0
    with pending_images(spark, table, predictions, model, storage) as pending:
        num = pending.count
        if num and spark is None:
            raise NeedsSpark
        began = time.perf_counter()
        contents = _pending_contents(spark, table, pending) if spark is not None and num else None
    if spark is not None and contents is not None:
        check_file_visible(spark, table.path, "_delta_log", "predict.table" if predict.table else "storage.tables")
        check_visible(spark, predictions, "predict.predictions" if predict.predictions else "storage.tables")
        package = _send_package(spark, storage, model)
        with counted("predict", num):
            errors = _predict_pending(spark, contents, predictions, package, model, predict.batch_size)
        seconds = time.perf_counter() - began
    written = snapshots.latest(spark, predictions)
    rate = f", {num / seconds:.0f} images/s" if seconds else "; nothing new, nothing committed"
    logger.info("%d images predicted by %s version %d%s", num, model.name, model.version, rate)
    return PredictReport(
        predictions=written,
        model=model,
        predicted=num,
        errors=errors,
        seconds=seconds,
        least_confident=least_confident(spark, table, written, model, storage),
    )


def _pending_contents(spark: SparkSession, table: TableRef, pending: PendingImages) -> DataFrame:
    """Return sha256 and content of the pending images, in one partition per task of inference."""
    slots = num_task_slots(spark)
    # A worker loads the model once per task: few tasks, not one per file.
    tasks = num_tasks(pending.count, slots, least=slots)
    contents = snapshots.read_version(spark, table).select("sha256", "content")
    if pending.count == pending.num_images:
        # The files of a large table fill all cores evenly, and no image is shuffled.
        is_large = contents.rdd.getNumPartitions() >= MIN_PARTS_PER_CORE * slots
        return contents.coalesce(tasks) if is_large else contents.repartition(tasks)
    chosen = spark.createDataFrame(pending.table())
    chosen = F.broadcast(chosen) if pending.count <= BROADCAST_ROWS else chosen
    return contents.join(chosen, on="sha256", how="left_semi").repartition(tasks)


def _send_package(spark: SparkSession, storage: Storage, model: ModelRef) -> str:
    """Send the model package to every executor, none of which needs the registry; return its folder's name there."""
    # Independent of the registry: a name with slashes would lead out of the workers' folder.
    name = f"model-{uuid4().hex}"
    # The driver serves the archive as long as the session: an executor that starts later fetches it, too.
    archive = Path(spark.sparkContext._temp_dir) / f"{name}.zip"
    with TemporaryDirectory(prefix="lakevision-model-") as scratch:
        folder = fetch_classifier(storage, model, Path(scratch) / name)
        # One archive, since a cluster refuses a folder. Uncompressed, since weights do not compress.
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
            for file in sorted(folder.rglob("*")):
                packed.write(file, file.relative_to(folder))
    # A URI: Spark would take a number sign, a space or a percent sign in the home's path for a part of one.
    spark.sparkContext.addArchive(f"{archive.as_uri()}#{name}")
    return name


def _predict_pending(
    spark: SparkSession,
    pending: DataFrame,
    predictions: str,
    package: str,
    model: ModelRef,
    batch_size: int,
) -> int:
    """Predict and merge in one commit; return the number of images with an error instead of a label."""
    predictor = make_predictor(package, batch_size, threads_per_task(spark), count_ended_tasks(spark.sparkContext))
    rows = pending.select("sha256", predictor("content").alias("prediction")).select(
        "sha256",
        F.lit(model.name).alias("model_name"),
        F.lit(model.version).alias("model_version"),
        "prediction.*",
        F.current_timestamp().alias("predicted_at"),
    )
    # A merge reads its source twice: persisted, so that images are predicted once.
    new = delta.with_schema(rows, PREDICTIONS).persist()
    try:
        errors = new.where(F.col("error").isNotNull()).count()
        with delta.translate_conflict(predictions):
            if snapshots.has_table(spark, predictions):
                own: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
                delta.merge(spark, predictions, new, PREDICTIONS_KEY, own).whenNotMatchedInsertAll().execute()
            else:
                delta.create_table(predictions, new, {})
    finally:
        new.unpersist()
    return errors
