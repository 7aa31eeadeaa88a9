"""The table of predictions: its path and columns, its rows by one model version, and the merge of new rows."""

import logging

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from tasks.config.prediction import PredictConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef
from tasks.schema import (
    ADDED_TO_PREDICTIONS,
    CHANGE_FEED,
    PREDICTIONS,
    PREDICTIONS_ARROW,
    PREDICTIONS_KEY,
    PREDICTIONS_PARTITION,
    PREDICTIONS_PROPERTIES,
    columns_of,
)
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage, csv_file
from tasks.system.disk import check_writable
from tasks.tables import delta, snapshots
from tasks.tables.delta_internals import Snapshot
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.writer import commit, write_access

logger = logging.getLogger("lakevision.predict")

MIN_ERRORS = 10
"""Number of errors from which on `predict.max_error_fraction` counts: a single new image may be broken."""

DIGEST = PREDICTIONS_ARROW.field("content_sha256")
JUDGED_ARROW = columns_of(PREDICTIONS_ARROW, "sha256", "content_sha256", "label", "top_labels")
"""Columns of a prediction that a model is judged by."""


def check_paths(path: str, predictions: str, predict: PredictConfig, storage: Storage) -> None:
    """Check the paths of a run of inference before it starts.

    Args:
        path: Path or URL of the other table that it reads or writes.
        predictions: Path or URL of the table of predictions.
        predict: Settings of inference, with the CSV file.
        storage: Storage with the home.

    Raises:
        WrongInput: A table cannot have this path, or nothing can be written to the home, beside the predictions, or to
            the CSV file.
    """
    delta.check_table_path(path)
    delta.check_table_path(predictions)
    check_writable(storage.home, "storage.home")
    check_writable(predictions, "predict.predictions")
    if (file := csv_file(predict.csv, storage)).is_dir():
        raise WrongInput(
            f"predict.csv is '{file}', a folder", setting="predict.csv", way_out="give the name of a file in it"
        )
    check_writable(str(file.parent), "predict.csv")


def predictions_setting(predict: PredictConfig) -> str:
    """Return the name of the setting from which the path of the table of predictions is."""
    return "predict.predictions" if predict.predictions else "storage.tables"


def check_predictions(columns: StructType, path: str) -> None:
    """Check that a table of predictions has the columns that inference writes, before images are predicted.

    Raises:
        WrongInput: Columns are missing, of another type, or unknown; the message names them.
    """
    wanted, found = ({field.name: field.dataType.simpleString() for field in of} for of in (PREDICTIONS, columns))
    wrong = [f"{name} ({found[name]})" for name in found if found[name] != wanted.get(name)]
    # Those of a later release are added, unless another program has given their names to other columns.
    required = [name for name in wanted if name in found or name not in ADDED_TO_PREDICTIONS]
    lacking = [f"{name} ({wanted[name]})" for name in required if found.get(name) != wanted[name]]
    if wrong or lacking:
        has = f" has {', '.join(wrong)}" if wrong else ""
        lacks = f" lacks {', '.join(lacking)}" if lacking else ""
        raise WrongInput(
            f"predict.predictions is '{path}', a table that{has}{' and' if has and lacks else ''}{lacks}, so "
            "predictions cannot be merged into it",
            setting="predict.predictions",
            way_out="give another path",
        )


def predicted_by(
    spark: SparkSession | None, model: ModelRef, path: str, schema: pa.Schema, storage: Storage
) -> pa.Table | ParquetRows:
    """Return the predictions by a model version in the newest version of their table; none without a table.

    Args:
        spark: The session, or None.
        model: The model version.
        path: Path or URL of the table.
        schema: Columns of the rows.
        storage: Storage with the home, for a temporary copy of a table that only Spark can read.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
        WrongInput: As `check_predictions`.
    """
    newest = snapshots.newest_snapshot(spark, path)
    if newest is None:
        return schema.empty_table()
    check_predictions(newest.schema, path)
    by: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
    return snapshots.version_rows(spark, newest.table, schema, scratch_root(storage), by)


def create_predictions(spark: SparkSession | None, path: str) -> str:
    """Return the id of the table of predictions, which is created without rows if it is missing.

    Raises:
        NeedsSpark: `spark` is None, and the table is missing, or only Spark can read it.
        WrongInput: As `check_predictions`.
    """
    with write_access(path, spark):
        newest = snapshots.newest_snapshot(spark, path)
        if newest is None:
            if spark is None:
                raise NeedsSpark
            rows = delta.no_rows(spark, PREDICTIONS)
            delta.create_table(path, rows, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)
            return snapshots.latest(spark, path).table_id
        check_predictions(newest.schema, path)
        return newest.table.table_id


def write(rows: DataFrame, predictions: str, model: ModelRef, predict: PredictConfig) -> int:
    """Merge predictions by one model version into their table; return the number of errors among them.

    Without rows, an existing table is not written to.

    Args:
        rows: Rows of PREDICTIONS with different keys, each of which is computed once.
        predictions: Path or URL of the table, which is created if it is missing.
        model: The model version of all rows.
        predict: Settings of inference.

    Raises:
        WrongInput: A larger fraction than `predict.max_error_fraction` has an error; nothing is committed.
    """
    # A merge reads its source twice: persisted, so that images are predicted once.
    new = rows.persist()
    try:
        ((num, errors, example),) = new.agg(F.count("*"), F.count("error"), F.min("error")).collect()
        check_errors(errors, num, example, predict)
        newest = snapshots.newest_snapshot(rows.sparkSession, predictions)
        if newest is None:
            delta.create_table(predictions, new, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)
        elif num:
            _merge(new, newest, model, replaces=predict.retry_errors)
    finally:
        new.unpersist()
    return int(errors)


def check_errors(errors: int, num: int, example: str | None, predict: PredictConfig) -> None:
    """Check the number of images with an error, before anything is written.

    Args:
        errors: Number of images with an error.
        num: Number of images.
        example: One of the errors.
        predict: Settings of inference.

    Raises:
        WrongInput: There are more than `predict.max_error_fraction` allows.
    """
    # Images whose errors are predicted again had them before.
    is_checked = errors >= MIN_ERRORS and not predict.retry_errors
    if is_checked and errors > predict.max_error_fraction * num:
        raise WrongInput(
            f"{errors} of {num} images have an error instead of a label, more than predict.max_error_fraction "
            f"{predict.max_error_fraction}, such as '{example}'",
            setting="predict.max_error_fraction",
            way_out="nothing was written; give other images, or raise that fraction",
        )


def _merge(new: DataFrame, newest: Snapshot, model: ModelRef, *, replaces: bool) -> None:
    spark, path = new.sparkSession, newest.table.path
    if newest.properties.get(CHANGE_FEED) != PREDICTIONS_PROPERTIES[CHANGE_FEED]:
        logger.info("%s: recording changes from now on, in Delta's change data feed", path)
        delta.set_properties(spark, path, PREDICTIONS_PROPERTIES)
    if added := [name for name in ADDED_TO_PREDICTIONS if name not in newest.schema.names]:
        logger.info("%s: adding the columns %s", path, ", ".join(added))
        delta.add_columns(spark, path, [PREDICTIONS[name] for name in added])
    own: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
    merge = delta.merge(spark, path, new, PREDICTIONS_KEY, own).whenNotMatchedInsertAll()
    commit(path, (merge.whenMatchedUpdateAll("t.error IS NOT NULL") if replaces else merge).execute)
