"""Predictions of a table's test images for the promotion gate, appended to `predictions` without Spark."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from tasks.model_package.classifier import ImageClassifier
from tasks.predict.accuracy import BATCH, load_registered
from tasks.predict.least_confident import SHA256_ARROW
from tasks.predict.pending import check_predictions
from tasks.predict.scoring import prediction_columns
from tasks.refs import ModelRef, TableRef
from tasks.schema import IMAGES_ARROW, PREDICTIONS, PREDICTIONS_KEY, PREDICTIONS_PROPERTIES, TEST
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.system.disk import translate_disk_full
from tasks.tables import snapshots
from tasks.tables.append import append_rows
from tasks.tables.parquet_rows import ParquetRows, spool_rows
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access

logger = logging.getLogger("lakevision.predict")

PREDICTIONS_ARROW = to_arrow_schema(PREDICTIONS)
CONTENT_ARROW = pa.schema([IMAGES_ARROW.field(name) for name in ("sha256", "content")])
KEY_ARROW = pa.schema([PREDICTIONS_ARROW.field(name) for name in PREDICTIONS_KEY])

MISSING = "SELECT DISTINCT sha256 FROM tested ANTI JOIN predicted USING (sha256)"


def predict_held_out(model: ModelRef, table: TableRef, storage: Storage) -> int:
    """Predict the test images of a table without a prediction by this model version; return their number.

    The rows are those of batch inference, which does not predict these images again. They are appended in one commit.

    Args:
        model: The model version.
        table: The table version.
        storage: Location of the table `predictions`, which is created if it is missing.

    Raises:
        NeedsSpark: Only Spark can read one of the tables, or write `predictions`.
        WrongInput: The model cannot be loaded, or the table `predictions` has other columns.
        DiskFull: The disk is full; nothing was appended.
    """
    path = storage.table("predictions")
    with write_access(path), translate_disk_full(path, storage.home):
        missing = _missing(model, table, path, storage)
        if not missing:
            return 0
        classifier = load_registered(model, storage)
        num = len(missing)
        rows = _predicted(classifier, model, table, missing)
        append_rows(path, spool_rows(rows, PREDICTIONS_ARROW, scratch_root(storage)), PREDICTIONS_PROPERTIES)
    logger.info("%d test images predicted by %s version %d for the comparison", num, model.name, model.version)
    return num


def first_image(table: TableRef) -> bytes | None:
    """Return an encoded test image of a table version, or None if it has none."""
    for rows in snapshots.read_batches(table, CONTENT_ARROW, {"split": TEST}, 1):
        if rows.num_rows:
            content: bytes = rows["content"][0].as_py()
            return content
    return None


def _missing(model: ModelRef, table: TableRef, path: str, storage: Storage) -> set[str]:
    scratch = scratch_root(storage)
    newest = snapshots.newest_snapshot(None, path)
    predicted: pa.Table | ParquetRows = KEY_ARROW.empty_table()
    if newest is not None:
        check_predictions(newest.schema, path)
        by: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
        predicted = snapshots.version_rows(None, newest.table, KEY_ARROW, scratch, by)
    with Relations(storage) as relations:
        relations.add("tested", snapshots.version_rows(None, table, SHA256_ARROW, scratch, {"split": TEST}))
        relations.add("predicted", predicted)
        return {sha256 for (sha256,) in relations.rows(MISSING)}


def _predicted(
    classifier: ImageClassifier, model: ModelRef, table: TableRef, missing: set[str]
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
            columns: pd.DataFrame = prediction_columns(classifier.predict(list(images.values())), classifier.precision)
            columns = columns.assign(
                sha256=list(images), model_name=model.name, model_version=model.version, predicted_at=at
            )
            yield pa.RecordBatch.from_pandas(columns, PREDICTIONS_ARROW, preserve_index=False)
