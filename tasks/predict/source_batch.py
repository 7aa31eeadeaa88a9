"""Batch inference on the images of a folder or URL, without a table of images."""

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.etl.gates import is_beyond, too_many_deleted
from tasks.etl.own_folders import OwnFolders
from tasks.etl.source import find_source
from tasks.predict.answers import source_answers
from tasks.predict.champion import check_promoted, model_of_images, named_model
from tasks.predict.inputs import GoneFiles, inputs_table, pending_files, record_inputs
from tasks.predict.predictions import check_errors, check_paths, predictions_setting, write
from tasks.predict.results import write_results
from tasks.predict.scoring import SentModel, prediction_rows, send_package, start_workers, with_predictions
from tasks.predict.source import SETTING, ListedSource, list_source, read_files
from tasks.predict.thumbnails import contents_in_source
from tasks.progress.count import counted
from tasks.refs import ModelRef, PredictReport, TableRef
from tasks.schema import FILE_ARROW, INPUTS
from tasks.spark.cluster import check_visible
from tasks.spark.session import NeedsSpark, keep_spark, try_without_spark
from tasks.storage import Storage, csv_file
from tasks.system.disk import translate_disk_full
from tasks.tables import delta, snapshots
from tasks.tables.writer import write_access
from tasks.tracking.models import SOURCE_TAG

logger = logging.getLogger("lakevision.predict")


@dataclass(frozen=True)
class PredictedFiles:
    """Result of the prediction of files.

    Attributes:
        images: Number of different images.
        errors: Number of these that have an error.
        unreadable: Number of files that cannot be read.
        vanished: Paths of files that were removed since they were listed.
    """

    images: int
    errors: int
    unreadable: int
    vanished: tuple[str, ...] = ()


def predict_source(
    predict: PredictConfig, promote: PromoteConfig, storage: Storage, config: SparkConfig, model: ModelRef | None = None
) -> PredictReport:
    """Predict every image file of `predict.source` without a prediction by this model version.

    The predictions are merged into `predictions`, then the files into the table `inputs` beside it. If a run is killed
    between these two commits, the next one reads the files again and commits the second. Spark is not started if source
    and tables are local and there is nothing to do.

    Args:
        predict: Settings of inference.
        promote: Settings with the name of the registered model; without a name, the model of the table `images`.
        storage: Locations of tables and models.
        config: Settings of the Spark session.
        model: Model version that was promoted before; None means the version with the alias.

    Raises:
        WrongInput: The source has no images or cannot be listed, or too many of its images have errors or are gone. The
            model or alias does not exist, or its files differ from the registered ones. The tables cannot be written.
        DiskFull: The disk is full; the tables are unchanged, or the next run commits `inputs`.
    """
    assert predict.source
    given = predict.source
    chosen = model or named_model(predict, promote, storage)
    predictions = predict.predictions or storage.table("predictions")
    inputs = inputs_table(predictions)
    check_paths(inputs, predictions, predict, storage)
    own = OwnFolders.of(find_source(given, storage, SETTING), storage, SETTING, predictions)
    with keep_spark():  # The session that lists a URL also reads its files.
        source = list_source(given, inputs, storage, config, own=own)

        def run(spark: SparkSession | None) -> PredictReport:
            nonlocal source  # A second attempt uses the listing of the first.
            with write_access(predictions, spark), translate_disk_full(predictions, storage.home):
                if source.before != delta.newest_commit(inputs):
                    source = list_source(given, inputs, storage, config, own=own)
                version = chosen or model_of_images(predict, storage, spark)
                log_model(version, source.name, storage)
                return _predict(spark, source, inputs, predictions, version, predict, storage)

        return try_without_spark(run, config, storage)


def log_model(model: ModelRef, source: str, storage: Storage) -> None:
    """Log which model predicts the files of which source; they need not be those that it was trained on.

    Raises:
        WrongInput: As `check_promoted`.
    """
    trained_on = check_promoted(model, storage).get(SOURCE_TAG, "")
    logger.info(
        "%s version %d, trained on images of '%s', predicts the files of '%s'",
        model.name, model.version, trained_on or "an unknown source", source,
    )  # fmt: skip


def _predict(
    spark: SparkSession | None,
    source: ListedSource,
    inputs: str,
    predictions: str,
    model: ModelRef,
    predict: PredictConfig,
    storage: Storage,
) -> PredictReport:
    found, seconds = PredictedFiles(0, 0, 0), 0.0
    again = predict.retry_errors
    files, gone = pending_files(spark, source, inputs, predictions, model, storage, retry_errors=again)
    if (files.num_rows or gone.rows.num_rows) and spark is None:
        raise NeedsSpark
    began = time.perf_counter()
    logger.info(
        "%d files in %s, %d of them to predict; %d files are gone",
        source.listing.num_rows, source.name, files.num_rows, gone.rows.num_rows,
    )  # fmt: skip
    if spark is not None and files.num_rows:
        start_workers(spark)
        check_visible(spark, predictions, predictions_setting(predict))
        sent = send_package(spark, storage, model, predict)
        found = predict_files(spark, files, source, inputs, predictions, sent, predict, gone)
        seconds = time.perf_counter() - began
    elif spark is not None and gone.rows.num_rows:
        _check_gone(gone, None, predict)
        record_inputs(delta.no_rows(spark, INPUTS), inputs, spark.createDataFrame(gone.rows))
    written, recorded = snapshots.latest(spark, predictions), snapshots.newest_snapshot(spark, inputs)
    rate = f", {found.images / seconds:.0f} images/s" if seconds else "; nothing new, nothing predicted"
    logger.info(
        "%d images predicted by %s version %d%s; %d files cannot be read",
        found.images, model.name, model.version, rate, found.unreadable,
    )  # fmt: skip
    table = None if recorded is None else recorded.table
    answers = source_results(spark, source, table, predictions, model, predict, storage)
    if table is not None:
        num_files, num_failed = answers["num_files"], answers["num_failed"]
        logger.info(
            "'%s': %d files = %d with an answer + %d failed + %s",
            source.name, num_files + source.left.num_ignored + source.left.num_systems,
            num_files - num_failed, num_failed, source.left.parts,
        )  # fmt: skip
    return PredictReport(
        predictions=written,
        model=model,
        predicted=found.images,
        errors=found.errors,
        seconds=seconds,
        inputs=table,
        unreadable=found.unreadable,
        **answers,
    )


def source_results(
    spark: SparkSession | None,
    source: ListedSource,
    inputs: TableRef | None,
    predictions: str,
    model: ModelRef,
    predict: PredictConfig,
    storage: Storage,
) -> dict[str, Any]:
    """Write the CSV file of a source, and return the fields of `Answers`.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
    """
    left = {"num_ignored": source.left.num_ignored, "left_by_systems": source.left.num_systems}
    if inputs is None:
        return left
    rows = source_answers(spark, source.name, model, predictions, storage)
    contents = partial(contents_in_source, spark, source.location, inputs)
    return write_results(rows, csv_file(predict.csv, storage), contents, storage) | left


def predict_files(
    spark: SparkSession,
    files: pa.Table,
    source: ListedSource,
    inputs: str,
    predictions: str,
    sent: SentModel,
    predict: PredictConfig,
    gone: GoneFiles | None = None,
) -> PredictedFiles:
    """Read and predict files, and commit their predictions, then their rows of the table `inputs`.

    Args:
        spark: The session.
        files: The files (TO_PREDICT_ARROW), at least one.
        source: Their source.
        inputs: Path or URL of the table `inputs`.
        predictions: Path or URL of the table of predictions; the caller has the right to write to it.
        sent: The model.
        predict: Settings of inference.
        gone: Files whose rows are removed from the table `inputs`; None for none, as for a part of the source.

    Raises:
        WrongInput: Too many files have no label, or too many are gone; nothing is committed.
    """
    # An unreadable file has no content. The prediction of an empty one is not used.
    read = read_files(spark, files, source.location)
    images = read.withColumn("content", F.coalesce("content", F.lit(b"")))
    # Predictions and rows of files come from one reading.
    predicted = with_predictions(images, sent, predict).persist()
    try:
        with counted("predict", files.num_rows):
            num_read, found = _check(predicted, predict)
        if gone is not None:
            _check_gone(gone, predicted, predict)
        # Files with the same content are one image.
        different = predicted.where(F.col("sha256").isNotNull() & _is_new()).dropDuplicates(["sha256"])
        write(prediction_rows(different, sent.model), predictions, sent.model, predict)
        removed = spark.createDataFrame(gone.rows) if gone is not None and gone.rows.num_rows else None
        recorded = predicted.select(F.lit(source.name).alias("source"), *FILE_ARROW.names, "sha256", "error")
        record_inputs(recorded, inputs, removed)
        if num_read == files.num_rows:
            return found
        paths = predicted.select("path").toArrow()["path"]
        return replace(found, vanished=tuple(sorted(set(files["path"].to_pylist()) - set(paths.to_pylist()))))
    finally:
        predicted.unpersist()


def _check(predicted: DataFrame, predict: PredictConfig) -> tuple[int, PredictedFiles]:
    """Return the number of files that were found, and the numbers of their images and errors.

    Raises:
        WrongInput: Too many of them have no label; nothing is committed.
    """
    is_new = _is_new()
    error = F.when(is_new, F.col("prediction.error"))
    ((num_read, num, errors, unreadable, example),) = predicted.agg(
        F.count("*"),
        F.count_distinct(F.when(is_new, F.col("sha256"))),
        F.count_distinct(F.when(error.isNotNull(), F.col("sha256"))),
        F.count("error"),
        F.min(F.coalesce("error", error)),
    ).collect()
    check_errors(errors + unreadable, num + unreadable, example, predict)
    return num_read, PredictedFiles(num, errors, unreadable)


def _is_new() -> Column:
    """Return whether the content of a file has no prediction yet: that of a file that was only touched has one."""
    return F.col("known_sha256").isNull() | (F.col("known_sha256") != F.col("sha256"))


def _check_gone(gone: GoneFiles, predicted: DataFrame | None, predict: PredictConfig) -> None:
    """Check that the source has not lost too many images, as if a part of it were not mounted.

    Args:
        gone: The files that are gone.
        predicted: The files that were read, with their sha256: a renamed file is not gone.
        predict: Settings with the bound.

    Raises:
        WrongInput: More than `max_deleted_fraction` of the images would leave the table `inputs`, and more than
            DELETED_FLOOR of them.
    """
    bound, num_gone = predict.max_deleted_fraction, gone.contents.num_rows
    if predicted is not None and is_beyond(num_gone, gone.num_known, bound):
        contents = predicted.sparkSession.createDataFrame(gone.contents)
        num_gone = contents.join(predicted.select("sha256").distinct(), on="sha256", how="left_anti").count()
    if is_beyond(num_gone, gone.num_known, bound):
        raise too_many_deleted(
            f"the table 'inputs' would lose {num_gone} of {gone.num_known} images of '{predict.source}', more than "
            f"predict.max_deleted_fraction {bound} allows",
            "predict.max_deleted_fraction",
            "nothing was written",
        )
