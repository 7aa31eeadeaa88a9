"""Predictions of a table's test images for the promotion gate, added to `predictions` without Spark if possible."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from tasks.config.prediction import PredictConfig
from tasks.model_package.classifier import ImageClassifier
from tasks.predict.accuracy import BATCH, load_registered
from tasks.predict.least_confident import SHA256_ARROW
from tasks.predict.pending import KEY, KEYS_ARROW, check_keys, contents_of
from tasks.predict.predictions import predicted_by
from tasks.predict.predictor import prediction_columns
from tasks.predict.scoring import check_settings, score, send_package, spread, start_workers
from tasks.predict.write import write
from tasks.refs import ModelRef, TableRef
from tasks.schema import IMAGES_ARROW, PREDICTIONS, PREDICTIONS_KEY, PREDICTIONS_PARTITION, PREDICTIONS_PROPERTIES, TEST
from tasks.spark.scratch import scratch_root
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
MISSING_ARROW = KEYS_ARROW.insert(0, SHA256_ARROW.field("sha256")).append(pa.field("is_repeated", pa.bool_()))

MISSING = f"""
SELECT sha256, {KEY} AS key, count(*) > 1 AS is_repeated FROM tested ANTI JOIN predicted USING (sha256) GROUP BY sha256
"""  # noqa: S608  # constants


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
        WrongInput: The model cannot be loaded, an image has no sha256, or the table `predictions` has other columns.
        DiskFull: The disk is full; nothing was added.
    """
    path = storage.table("predictions")
    with write_access(path, spark), translate_disk_full(path, storage.home):
        missing = _missing(spark, model, table, path, storage)
        num: int = missing.num_rows
        if not num:
            return 0
        # Here also for Spark, on whose workers a damaged file would fail a job.
        classifier = load_registered(model, storage)
        check_settings(predict, classifier.classes)
        if spark is None:
            rows = _predicted(classifier, model, table, set(missing["sha256"].to_pylist()), predict)
            spooled = spool_rows(rows, PREDICTIONS_ARROW, scratch_root(storage))
            append_rows(path, spooled, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)
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


def _missing(spark: SparkSession | None, model: ModelRef, table: TableRef, path: str, storage: Storage) -> pa.Table:
    """Return the test images without a prediction, as MISSING_ARROW.

    Raises:
        WrongInput: An image has no sha256.
    """
    scratch = scratch_root(storage)
    predicted = predicted_by(spark, model, path, KEY_ARROW, storage)
    with Relations(storage) as relations:
        relations.add("tested", snapshots.version_rows(spark, table, SHA256_ARROW, scratch, {"split": TEST}))
        relations.add("predicted", predicted)
        ((num, nulls),) = relations.rows("SELECT count(*), count(*) - count(sha256) FROM tested")
        check_keys(table.path, num, nulls)
        return relations.table(MISSING, MISSING_ARROW)


def _contents(spark: SparkSession, table: TableRef, missing: pa.Table) -> DataFrame:
    """Return sha256 and content of the missing images, each once, as `spread`."""
    rows = snapshots.read_version(spark, table).where(F.col("split") == TEST).select("sha256", "content")
    is_repeated = missing["is_repeated"]
    keys, repeated = (missing.filter(part).select(["key"]) for part in (pc.invert(is_repeated), is_repeated))
    return spread(contents_of(rows, keys, repeated), missing.num_rows)


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
