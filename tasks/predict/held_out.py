"""Predictions of a table's test images for the promotion gate, added to `predictions` without Spark if possible."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from tasks.config.prediction import PredictConfig
from tasks.model_package.classifier import ImageClassifier
from tasks.predict.accuracy import BATCH, load_registered
from tasks.predict.least_confident import SHA256_ARROW
from tasks.predict.predictions import predicted_by
from tasks.predict.predictor import prediction_columns
from tasks.predict.scoring import check_settings, score, send_package, start_workers
from tasks.predict.write import write
from tasks.refs import ModelRef, TableRef
from tasks.schema import IMAGES_ARROW, PREDICTIONS, PREDICTIONS_KEY, PREDICTIONS_PROPERTIES, TEST
from tasks.spark.cluster import num_task_slots
from tasks.spark.progress import num_tasks
from tasks.spark.scratch import scratch_root
from tasks.spark.session import BROADCAST_ROWS
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.append import append_rows
from tasks.tables.parquet_rows import spool_rows
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.predict")

PREDICTIONS_ARROW = to_arrow_schema(PREDICTIONS)
CONTENT_ARROW = pa.schema([IMAGES_ARROW.field(name) for name in ("sha256", "content")])
KEY_ARROW = pa.schema([PREDICTIONS_ARROW.field(name) for name in PREDICTIONS_KEY])

MISSING = "SELECT DISTINCT sha256 FROM tested ANTI JOIN predicted USING (sha256)"


def predict_held_out(
    spark: SparkSession | None, model: ModelRef, table: TableRef, storage: Storage, predict: PredictConfig
) -> int:
    """Predict the test images of a table without a prediction by this model version; return their number.

    The rows are those of batch inference, which does not predict these images again. They are added in one commit. With
    a session, batch inference itself predicts them.

    Args:
        spark: The session, or None.
        model: The model version.
        table: The table version.
        storage: Location of the table `predictions`, which is created if it is missing.
        predict: Settings of inference for the rows. Any number of them may have an error: that is an answer, too.

    Raises:
        NeedsSpark: Only Spark can read one of the tables, or write `predictions`.
        WrongInput: The model cannot be loaded, or the table `predictions` has other columns.
        DiskFull: The disk is full; nothing was added.
    """
    path = storage.table("predictions")
    with write_access(path, spark), translate_disk_full(path, storage.home):
        missing = _missing(spark, model, table, path, storage)
        if not missing:
            return 0
        num = len(missing)
        # Here also for Spark, on whose workers a damaged file would fail a job.
        classifier = load_registered(model, storage)
        check_settings(predict, classifier.classes)
        if spark is None:
            rows = _predicted(classifier, model, table, missing, predict)
            append_rows(path, spool_rows(rows, PREDICTIONS_ARROW, scratch_root(storage)), PREDICTIONS_PROPERTIES)
        else:
            start_workers(spark)
            settings = predict.model_copy(update={"max_error_fraction": 1.0, "retry_errors": False})
            sent = send_package(spark, storage, model, settings)
            write(score(_contents(spark, table, missing), sent, settings), path, model, settings)
    logger.info("%d test images predicted by %s version %d for the comparison", num, model.name, model.version)
    return num


def first_image(spark: SparkSession | None, table: TableRef) -> bytes | None:
    """Return an encoded test image of a table version, or None if it has none.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    if spark is not None:
        row = snapshots.read_version(spark, table).where(F.col("split") == TEST).select("content").first()
        return None if row is None else bytes(row["content"])
    for rows in snapshots.read_batches(table, CONTENT_ARROW, {"split": TEST}, 1):
        if rows.num_rows:
            content: bytes = rows["content"][0].as_py()
            return content
    return None


def _missing(spark: SparkSession | None, model: ModelRef, table: TableRef, path: str, storage: Storage) -> set[str]:
    scratch = scratch_root(storage)
    predicted = predicted_by(spark, model, path, KEY_ARROW, storage)
    with Relations(storage) as relations:
        relations.add("tested", snapshots.version_rows(spark, table, SHA256_ARROW, scratch, {"split": TEST}))
        relations.add("predicted", predicted)
        return {sha256 for (sha256,) in relations.rows(MISSING)}


def _contents(spark: SparkSession, table: TableRef, missing: set[str]) -> DataFrame:
    """Return sha256 and content of the missing images, each once, in one partition per task of inference."""
    chosen = spark.createDataFrame(pa.table([pa.array(sorted(missing), pa.string())], SHA256_ARROW))
    slots = num_task_slots(spark)
    rows = snapshots.read_version(spark, table).where(F.col("split") == TEST).select("sha256", "content")
    rows = rows.join(F.broadcast(chosen) if len(missing) <= BROADCAST_ROWS else chosen, on="sha256", how="left_semi")
    # By the key, so that no second shuffle is needed for an image that the table has twice.
    return rows.repartition(num_tasks(len(missing), slots, least=slots), "sha256").dropDuplicates(["sha256"])


def _predicted(
    classifier: ImageClassifier, model: ModelRef, table: TableRef, missing: set[str], predict: PredictConfig
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the images in `missing`, from which they are removed: a table may have one twice."""
    at = datetime.now(UTC)
    for rows in snapshots.read_batches(table, CONTENT_ARROW, {"split": TEST}, BATCH):
        images = {}
        for sha256, content in zip(rows["sha256"].to_pylist(), rows["content"].to_pylist(), strict=True):
            if sha256 in missing:
                missing.remove(sha256)
                images[sha256] = content
        if images:
            found = classifier.predict(list(images.values()), predict.top_k, predict.min_probability)
            columns: pd.DataFrame = prediction_columns(found, classifier.precision)
            columns = columns.assign(
                sha256=list(images), model_name=model.name, model_version=model.version, predicted_at=at
            )
            yield pa.RecordBatch.from_pandas(columns, PREDICTIONS_ARROW, preserve_index=False)
