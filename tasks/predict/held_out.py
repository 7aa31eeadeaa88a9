"""Predictions of a table's test images for the promotion gate, added to `predictions` without Spark if possible."""

import hashlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.config.prediction import PredictConfig
from tasks.model_package.classifier import ImageClassifier
from tasks.predict.evaluation import BATCH, load_registered
from tasks.predict.pending import KEY, KEYS_ARROW, SHA256_ARROW, check_keys, contents_of
from tasks.predict.predictions import DIGEST, JUDGED_ARROW, predicted_by, write
from tasks.predict.predictor import prediction_columns
from tasks.predict.scoring import check_settings, score, send_package, spread, start_workers
from tasks.refs import TEST, ModelRef, TableRef
from tasks.schema import (
    IMAGES_ARROW,
    PREDICTIONS_ARROW,
    PREDICTIONS_KEY,
    PREDICTIONS_PARTITION,
    PREDICTIONS_PROPERTIES,
    columns_of,
)
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.direct_commits import append_rows
from tasks.tables.parquet_rows import ParquetRows, SpooledRows, spool_rows
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.predict")

CONTENT_ARROW = columns_of(IMAGES_ARROW, "sha256", "content")
READ_ARROW = CONTENT_ARROW.insert(1, IMAGES_ARROW.field("label"))
TESTED_ARROW = pa.schema([*SHA256_ARROW, IMAGES_ARROW.field("label"), DIGEST])
"""Columns of the test images, with the digest of the bytes that a model predicts."""

KEY_ARROW = columns_of(PREDICTIONS_ARROW, *PREDICTIONS_KEY, DIGEST.name)
MISSING_ARROW = pa.schema(
    [*SHA256_ARROW, *KEYS_ARROW, DIGEST, pa.field("is_repeated", pa.bool_()), pa.field("is_known", pa.bool_())]
)

OWN = "CREATE TABLE own AS FROM predicted SEMI JOIN tested USING (sha256)"
"""The predictions of the test images; of other images no hash table is made."""

MISSING = f"""
WITH wanted AS (
    SELECT sha256, min(content_sha256) AS content_sha256, count(*) > 1 AS is_repeated FROM tested GROUP BY sha256
)
SELECT sha256, {KEY} AS key, content_sha256, is_repeated, sha256 IN (FROM own SELECT sha256) AS is_known
FROM wanted ANTI JOIN own USING (sha256, content_sha256)
"""  # noqa: S608  # constants
"""Test images that a model has not predicted, or from other bytes; of an image with several rows, one counts."""


def held_out_images(spark: SparkSession | None, table: TableRef, storage: Storage) -> SpooledRows:
    """Return the test images of a table version (TESTED_ARROW), a row for each of its rows.

    Args:
        spark: The session, or None.
        table: The table version.
        storage: Storage with the home, for temporary files.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    scratch = scratch_root(storage)
    if spark is None:
        return spool_rows(_digested(table), TESTED_ARROW, scratch)
    rows = snapshots.read_version(spark, table).where(F.col("split") == TEST)
    digested = rows.select("sha256", "label", F.sha2("content", 256).alias("content_sha256"))
    return spool_rows(snapshots.stream_rows(digested, TESTED_ARROW), TESTED_ARROW, scratch)


def _digested(table: TableRef) -> Iterator[pa.RecordBatch]:
    for rows in snapshots.read_batches(table, READ_ARROW, {"split": TEST}, BATCH):
        digests = [hashlib.sha256(content).hexdigest() for content in rows["content"].to_pylist()]
        yield pa.RecordBatch.from_arrays([rows["sha256"], rows["label"], pa.array(digests)], schema=TESTED_ARROW)


def predict_held_out(
    spark: SparkSession | None,
    model: ModelRef,
    table: TableRef,
    tested: ParquetRows,
    storage: Storage,
    predict: PredictConfig,
) -> pa.Table | ParquetRows:
    """Predict the test images of a table without a prediction from their stored bytes by this model version.

    The rows are those of batch inference, which does not predict these images again. They are added in one commit. With
    a session, batch inference itself predicts them. A row of other bytes, as those of the original file, or of an
    earlier release, which does not say, stays as it is.

    Args:
        spark: The session, or None.
        model: The model version.
        table: The table version.
        tested: Its test images, as `held_out_images`.
        storage: Location of the table `predictions`, which is created if it is missing.
        predict: Settings of inference for the rows. Any number of them may have an error: that is an answer, too.

    Returns:
        Rows of JUDGED_ARROW of the images whose row in `predictions` stays, though it is of other bytes.

    Raises:
        NeedsSpark: Only Spark can read one of the tables, or write `predictions`.
        WrongInput: The model cannot be loaded, an image has no sha256, or the table `predictions` has other columns.
        DiskFull: The disk is full; nothing was added.
    """
    path = storage.table("predictions")
    with write_access(path, spark), translate_disk_full(path, storage.home):
        missing = _missing(spark, model, table, tested, path, storage)
        if not missing.num_rows:
            return JUDGED_ARROW.empty_table()
        again, new = (missing.filter(part) for part in (missing["is_known"], pc.invert(missing["is_known"])))
        # Here also for Spark, on whose workers a damaged file would fail a job.
        classifier = load_registered(model, storage)
        check_settings(predict, classifier.classes)
        if classifier.unknown_thresholds is None:  # A model of an earlier release is compared all the same.
            predict = predict.model_copy(update={"unknown_rate": 0.0})
        if spark is None:
            if new.num_rows:
                rows = _predicted(classifier, model, table, new, predict)
                spooled = spool_rows(rows, PREDICTIONS_ARROW, scratch_root(storage))
                append_rows(path, spooled, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)
            rows = _predicted(classifier, model, table, again, predict) if again.num_rows else iter(())
        else:
            start_workers(spark)
            settings = predict.model_copy(update={"max_error_fraction": 1.0, "retry_errors": False})
            sent = send_package(spark, storage, model, settings)
            if new.num_rows:
                write(score(_contents(spark, table, new), sent, settings), path, model, settings)
            found = score(_contents(spark, table, again), sent, settings)
            rows = snapshots.stream_rows(found, PREDICTIONS_ARROW) if again.num_rows else iter(())
        judged = spool_rows((batch.select(JUDGED_ARROW.names) for batch in rows), JUDGED_ARROW, scratch_root(storage))
    logger.info(
        "%d test images predicted by %s version %d for the comparison, %d of them again, from their stored bytes",
        missing.num_rows, model.name, model.version, again.num_rows,
    )  # fmt: skip
    return judged


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


def _missing(
    spark: SparkSession | None, model: ModelRef, table: TableRef, tested: ParquetRows, path: str, storage: Storage
) -> pa.Table:
    """Return the test images to predict, as MISSING_ARROW.

    Raises:
        WrongInput: An image has no sha256.
    """
    predicted = predicted_by(spark, model, path, KEY_ARROW, storage)
    with Relations(storage) as relations:
        relations.add("tested", tested)
        relations.add("predicted", predicted)
        ((num, nulls),) = relations.rows("SELECT count(*), count(*) - count(sha256) FROM tested")
        check_keys(table.path, num, nulls)
        relations.run(OWN)
        return relations.table(MISSING, MISSING_ARROW)


def _contents(spark: SparkSession, table: TableRef, missing: pa.Table) -> DataFrame:
    """Return sha256 and content of the missing images, each once, as `spread`."""
    rows = snapshots.read_version(spark, table).where(F.col("split") == TEST).select("sha256", "content")
    is_repeated = missing["is_repeated"]
    keys, repeated = (missing.filter(part).select(["key"]) for part in (pc.invert(is_repeated), is_repeated))
    return spread(contents_of(rows, keys, repeated), missing.num_rows)


def _predicted(
    classifier: ImageClassifier, model: ModelRef, table: TableRef, missing: pa.Table, predict: PredictConfig
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the images in `missing`, each once: a table may have one twice."""
    at = datetime.now(UTC)
    wanted = dict(zip(missing["sha256"].to_pylist(), missing["content_sha256"].to_pylist(), strict=True))
    for rows in snapshots.read_batches(table, CONTENT_ARROW, {"split": TEST}, BATCH):
        images, digests = {}, []
        for sha256, content in zip(rows["sha256"].to_pylist(), rows["content"].to_pylist(), strict=True):
            if sha256 in wanted and wanted[sha256] == hashlib.sha256(content).hexdigest():
                digests.append(wanted.pop(sha256))
                images[sha256] = content
        if images:
            given = predict.top_k, predict.min_probability, predict.unknown_rate
            found = classifier.predict(list(images.values()), *given)
            columns: pd.DataFrame = prediction_columns(found, classifier.precision)
            columns = columns.assign(
                sha256=list(images),
                model_name=model.name,
                model_version=model.version,
                content_sha256=digests,
                predicted_at=at,
            )
            yield pa.RecordBatch.from_pandas(columns, PREDICTIONS_ARROW, preserve_index=False)
