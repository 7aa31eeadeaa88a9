"""Batch inference: a Spark iterator pandas UDF decodes and predicts the images without a prediction."""

import logging
import time

from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.predict.champion import check_model, check_promoted, model_of_table, named_model
from tasks.predict.pending import PREDICTED_ARROW, pending_images
from tasks.predict.predictions import check_paths, predicted_by, predictions_setting, write
from tasks.predict.results import table_results
from tasks.predict.scoring import score, send_package, spread, start_workers, unlearned_labels, warn_of_unlearned
from tasks.predict.source_batch import predict_source
from tasks.progress.count import counted
from tasks.refs import ModelRef, PredictReport, TableRef
from tasks.spark.cluster import check_file_visible, check_visible
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage, csv_file
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.predict")


def predict_batch(
    predict: PredictConfig,
    promote: PromoteConfig,
    storage: Storage,
    config: SparkConfig,
    table: TableRef | None = None,
    model: ModelRef | None = None,
) -> PredictReport:
    """Predict every image without a prediction by this model version, and merge the result into `predictions`.

    Spark is not started if every image has a prediction. With `predict.source`, it is `predict_source`.

    Args:
        predict: Settings of inference.
        promote: Settings with the name of the registered model; without a name, the model trained from the table.
        storage: Locations of tables and models.
        config: Settings of the Spark session.
        table: Table version to predict on; None means `predict.table_version` of `predict.table`.
        model: Model version that was promoted for the table; None means the version with the alias.

    Raises:
        WrongInput: The model, alias or table does not exist, or the table lacks columns. The model was trained on
            another table, or its files differ from the registered ones. The predictions cannot be written.
        DiskFull: The disk is full; the table is unchanged.
    """
    if predict.source:
        return predict_source(predict, promote, storage, config, model)
    # Before a session starts: a name that is set may have no version.
    named = named_model(predict, promote, storage) if promote.model_name is not None and model is None else None
    path = predict.table or storage.table("images")
    predictions = predict.predictions or storage.table("predictions")
    check_paths(path, predictions, predict, storage)

    def run(spark: SparkSession | None) -> PredictReport:
        with write_access(predictions, spark), translate_disk_full(predictions, storage.home):
            images = table or snapshots.at_version(spark, path, predict.table_version, "predict.table_version")
            version = model or named or model_of_table(images, predict, storage)
            if model is not None and predict.table is None:
                # Returned by the promotion for this table; it may be the champion of a table with the same images.
                check_promoted(version, storage)
            else:
                check_model(version, images, predict, promote, storage)
            return _predict(spark, images, version, predictions, predict, storage)

    return try_without_spark(run, config, storage)


def _predict(
    spark: SparkSession | None,
    table: TableRef,
    model: ModelRef,
    predictions: str,
    predict: PredictConfig,
    storage: Storage,
) -> PredictReport:
    setting = predictions_setting(predict)
    errors, seconds = 0, 0.0
    unlearned: tuple[str, ...] = ()
    predicted = predicted_by(spark, model, predictions, PREDICTED_ARROW, storage)
    with pending_images(spark, table, predicted, storage, retry_errors=predict.retry_errors) as pending:
        num = pending.count
        if num and spark is None:
            raise NeedsSpark
        began = time.perf_counter()
        contents = pending.contents(spark) if spark is not None and num else None
        labels = pending.labels() if num else ()
    if spark is not None and contents is not None:
        start_workers(spark)
        check_file_visible(spark, table.path, "_delta_log", "predict.table" if predict.table else "storage.tables")
        check_visible(spark, predictions, setting)
        sent = send_package(spark, storage, model, predict)
        unlearned = tuple(sorted(unlearned_labels(labels, sent.classes)))
        warn_of_unlearned(unlearned, table, model)
        with counted("predict", num):
            errors = write(score(spread(contents, num), sent, predict), predictions, model, predict)
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
        unlearned=unlearned,
        **table_results(spark, table, predictions, model, csv_file(predict.csv, storage), storage),
    )
