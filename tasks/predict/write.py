"""The merge of predictions into their table, in one commit."""

import logging

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.config.prediction import PredictConfig
from tasks.errors import WrongInput
from tasks.refs import ModelRef
from tasks.schema import (
    ADDED_TO_PREDICTIONS,
    CHANGE_FEED,
    PREDICTIONS,
    PREDICTIONS_KEY,
    PREDICTIONS_PARTITION,
    PREDICTIONS_PROPERTIES,
)
from tasks.tables import delta, snapshots
from tasks.tables.writer import commit

logger = logging.getLogger("lakevision.predict")

MIN_ERRORS = 10
"""Number of errors from which on `predict.max_error_fraction` counts: a single new image may be broken."""


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
    spark = rows.sparkSession
    # A merge reads its source twice: persisted, so that images are predicted once.
    new = rows.persist()
    try:
        ((num, errors, example),) = new.agg(F.count("*"), F.count("error"), F.min("error")).collect()
        check_errors(errors, num, example, predict)
        if num or snapshots.newest_snapshot(spark, predictions) is None:
            _merge(spark, new, predictions, model, replaces=predict.retry_errors)
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
            f"{predict.max_error_fraction}, such as '{example}': nothing was written; give other images, or raise "
            "that fraction"
        )


def _merge(spark: SparkSession, new: DataFrame, predictions: str, model: ModelRef, *, replaces: bool) -> None:
    newest = snapshots.newest_snapshot(spark, predictions)
    if newest is None:
        delta.create_table(predictions, new, PREDICTIONS_PROPERTIES, PREDICTIONS_PARTITION)
        return
    if newest.properties.get(CHANGE_FEED) != PREDICTIONS_PROPERTIES[CHANGE_FEED]:
        logger.info("%s: recording changes from now on, in Delta's change data feed", predictions)
        delta.set_properties(spark, predictions, PREDICTIONS_PROPERTIES)
    existing = newest.schema.names
    if added := [name for name in ADDED_TO_PREDICTIONS if name not in existing]:
        logger.info("%s: adding the columns %s", predictions, ", ".join(added))
        delta.add_columns(spark, predictions, [PREDICTIONS[name] for name in added])
    own: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
    merge = delta.merge(spark, predictions, new, PREDICTIONS_KEY, own).whenNotMatchedInsertAll()
    commit(predictions, (merge.whenMatchedUpdateAll("t.error IS NOT NULL") if replaces else merge).execute)
