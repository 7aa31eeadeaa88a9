"""Batch inference: a Spark iterator pandas UDF decodes and predicts the images without a prediction."""

import logging
import time
from collections.abc import Collection, Iterable

from pyspark.sql import DataFrame, SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import join_names
from tasks.predict.champion import NUM_NAMED, check_model, check_promoted, model_of_table, named_model
from tasks.predict.least_confident import least_confident
from tasks.predict.pending import PendingImages, contents_of, pending_images
from tasks.predict.predictions import check_paths, predictions_setting
from tasks.predict.scoring import score, send_package, spread, start_workers
from tasks.predict.source_batch import predict_source
from tasks.predict.write import write
from tasks.progress.count import counted
from tasks.refs import ModelRef, PredictReport, TableRef
from tasks.spark.cluster import check_file_visible, check_visible
from tasks.spark.session import NeedsSpark, try_without_spark
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.writer import write_access
from tasks.text.forms import as_known

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
    chosen = model or named_model(predict, promote, storage)
    path = predict.table or storage.table("images")
    predictions = predict.predictions or storage.table("predictions")
    check_paths(path, predictions, storage)

    def run(spark: SparkSession | None) -> PredictReport:
        with write_access(predictions, spark), translate_disk_full(predictions, storage.home):
            images = table or snapshots.at_version(spark, path, predict.table_version, "predict.table_version")
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
    errors, seconds = 0, 0.0
    unlearned: tuple[str, ...] = ()
    again = predict.retry_errors
    with pending_images(spark, table, predictions, model, storage, retry_errors=again) as pending:
        num = pending.count
        if num and spark is None:
            raise NeedsSpark
        began = time.perf_counter()
        contents = None
        if spark is not None and num:
            start_workers(spark)
            contents = _pending_contents(spark, table, pending)
        labels = pending.labels() if num else ()
    if spark is not None and contents is not None:
        check_file_visible(spark, table.path, "_delta_log", "predict.table" if predict.table else "storage.tables")
        check_visible(spark, predictions, predictions_setting(predict))
        sent = send_package(spark, storage, model, predict)
        unlearned = tuple(sorted(unlearned_labels(labels, sent.classes)))
        warn_of_unlearned(unlearned, table, model)
        with counted("predict", num):
            errors = write(score(contents, sent, predict), predictions, model, predict)
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
        least_confident=least_confident(spark, table, written, model, storage),
    )


def _pending_contents(spark: SparkSession, table: TableRef, pending: PendingImages) -> DataFrame:
    """Return sha256 and content of the pending images, as `spread`."""
    contents = snapshots.read_version(spark, table).select("sha256", "content")
    if pending.num_rows > pending.count:
        logger.warning(
            "%d rows of %s repeat the sha256 of another row; the image of each sha256 is predicted once",
            pending.num_rows - pending.count,
            table.path,
        )
        contents = contents_of(contents, pending.keys(), pending.keys(repeated=True))
    elif pending.num_rows < pending.num_images:
        # An image with the same key as a pending one is predicted again, and not inserted twice.
        contents = contents_of(contents, pending.keys())
    return spread(contents, pending.count)


def unlearned_labels(labels: Iterable[str], classes: Collection[str]) -> set[str]:
    """Return the labels that are not classes of a model; a label in another form of Unicode is the same."""
    form_of = as_known(set(classes))
    return {label for label in labels if form_of(label) not in classes}


def warn_of_unlearned(labels: tuple[str, ...], table: TableRef, model: ModelRef) -> None:
    """Warn of labels of the table that the model cannot predict."""
    if labels:
        logger.warning(
            "%s version %d was trained without %s of '%s', so that it gives their images other labels: train again",
            model.name,
            model.version,
            join_names(list(labels[:NUM_NAMED]), len(labels)),
            table.path,
        )
