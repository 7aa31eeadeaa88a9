"""The champion's answer for each file: its prediction, joined with path, and with label and split where it has them."""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.errors import WrongInput
from tasks.etl.source import find_source
from tasks.predict.champion import model_of_images, model_of_table, named_model
from tasks.predict.inputs import check_inputs, inputs_table
from tasks.predict.least_confident import LEDGER_ARROW, NAMED_ARROW
from tasks.predict.predictions import predicted_by
from tasks.predict.source import SETTING
from tasks.schema import DUPLICATE, IMAGE_KEYS_ARROW, PREDICTIONS_ARROW, STORED, columns_of
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

PREDICTED_ARROW = columns_of(
    PREDICTIONS_ARROW, "sha256", "model_version", "label", "probability", "error", "predicted_at"
)

ANSWERS_ARROW = pa.schema(
    [
        ("path", pa.string()),
        *IMAGE_KEYS_ARROW,
        ("predicted", pa.string()),
        ("probability", pa.float64()),
        ("error", pa.string()),
        ("model_version", pa.int64()),
        ("predicted_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns of the answers: label is that of the source, predicted that of the champion (null: not predicted yet)."""

ANSWERS = """
SELECT path, images.sha256, images.label, images.split, predicted.label AS predicted, probability, predicted.error,
    model_version, predicted_at
FROM images
LEFT JOIN predicted ON images.sha256 = predicted.sha256
LEFT JOIN (SELECT path, sha256 FROM ledger WHERE outcome IN ($stored, $duplicate)) AS named
    ON images.sha256 = named.sha256
"""

FILE_ANSWERS_ARROW = pa.schema(
    [(field.name, field.type) for field in ANSWERS_ARROW if field.name not in {"label", "split"}]
)
"""Columns of the answers for files in no table of images; sha256 is null for a file that cannot be read."""

FILE_ANSWERS = """
SELECT path, inputs.sha256, predicted.label AS predicted, probability, coalesce(inputs.error, predicted.error) AS error,
    model_version, predicted_at
FROM inputs LEFT JOIN predicted ON inputs.sha256 = predicted.sha256
"""


def champion_answers(
    storage: Storage, predict: PredictConfig, promote: PromoteConfig, spark: SparkSession | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield a row of ANSWERS_ARROW for each file with an image in the newest version of the table `images`.

    The rows have no order. Files with the same content have the same answer.

    Args:
        storage: Locations of tables and models.
        predict: Settings with the alias of the model version, and the table of predictions.
        promote: Settings with the name of the registered model; without a name, the model of the table.
        spark: A session, for tables that only Spark can read.

    Raises:
        WrongInput: The table or the model does not exist, or the table of predictions has other columns.
        NeedsSpark: `spark` is None, and only Spark can read the tables.
    """
    scratch = scratch_root(storage)
    images = snapshots.latest(spark, storage.table("images"))
    model = named_model(predict, promote, storage) or model_of_table(images, predict, storage)
    path = predict.predictions or storage.table("predictions")
    predicted = predicted_by(spark, model, path, PREDICTED_ARROW, storage)
    ledger: pa.Table | ParquetRows = LEDGER_ARROW.empty_table()
    if (files := snapshots.newest_snapshot(spark, storage.table("files"))) is not None:
        ledger = snapshots.version_rows(spark, files.table, LEDGER_ARROW, scratch)
    with Relations(storage) as relations:
        relations.add("images", snapshots.version_rows(spark, images, IMAGE_KEYS_ARROW, scratch))
        relations.add("predicted", predicted)
        relations.add("ledger", ledger)
        yield from relations.batches(ANSWERS, ANSWERS_ARROW, {"stored": STORED, "duplicate": DUPLICATE})


def source_answers(
    storage: Storage, predict: PredictConfig, promote: PromoteConfig, spark: SparkSession | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield a row of FILE_ANSWERS_ARROW for each file of `predict.source` that a run of inference has found.

    The rows have no order. Files with the same content have the same answer. There are none before the first run.

    Args:
        storage: Locations of tables and models.
        predict: Settings with the source, the alias of the model version, and the table of predictions.
        promote: Settings with the name of the registered model; without a name, the model of the table `images`.
        spark: A session, for tables that only Spark can read.

    Raises:
        WrongInput: The settings name no source, the model does not exist, or a table has other columns.
        NeedsSpark: `spark` is None, and only Spark can read the tables.
    """
    if not predict.source:
        raise WrongInput(
            "predict.source is empty",
            setting="predict.source",
            way_out="give the folder or URL, or read champion_answers for a table",
        )
    source = str(find_source(predict.source, storage, SETTING))
    model = named_model(predict, promote, storage) or model_of_images(predict, storage, spark)
    predictions = predict.predictions or storage.table("predictions")
    path = inputs_table(predictions)
    files: pa.Table | ParquetRows = NAMED_ARROW.empty_table()
    if (newest := snapshots.newest_snapshot(spark, path)) is not None:
        check_inputs(newest.schema, path)
        files = snapshots.version_rows(spark, newest.table, NAMED_ARROW, scratch_root(storage), {"source": source})
    with Relations(storage) as relations:
        relations.add("inputs", files)
        relations.add("predicted", predicted_by(spark, model, predictions, PREDICTED_ARROW, storage))
        yield from relations.batches(FILE_ANSWERS, FILE_ANSWERS_ARROW)
