"""Batch inference as a Prefect task."""

import hashlib
import json
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.context import TaskRunContext

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import join_names
from tasks.orchestration.task import skipped, stage
from tasks.predict.batch import predict_batch
from tasks.predict.champion import NUM_NAMED
from tasks.refs import ModelRef, PredictReport, TableRef
from tasks.storage import Storage
from tasks.tables.delta import check_table_path
from tasks.text.markup import in_cells, markdown_text


def _key(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    """Return the cache key of table version and model version, None if one is missing or errors are retried."""
    table, model = parameters.get("table"), parameters.get("model")
    predictions = parameters["predict"].predictions or parameters["storage"].table("predictions")
    settings = parameters["predict"]
    if table is None or model is None or settings.retry_errors or settings.source or not check_table_path(predictions):
        return None
    decisive = [table.model_dump(), model.model_dump(), predictions]
    return f"predict-{hashlib.sha256(json.dumps(decisive).encode()).hexdigest()}"


@stage("predict", timeout_in="predict", cache_key=_key)
def predict_images(
    predict: PredictConfig,
    promote: PromoteConfig,
    storage: Storage,
    spark_config: SparkConfig,
    table: TableRef | None = None,
    model: ModelRef | None = None,
) -> PredictReport:
    """Predict every image of the table or source without a prediction by the champion."""
    report = predict_batch(predict, promote, storage, spark_config, table, model)
    publish_predictions(report)
    return report if report.predicted else skipped(report, "every image has a prediction by this model version")


def publish_predictions(report: PredictReport) -> None:
    """Create the table artifact of the least confident predictions."""
    about = (
        f"The least confident predictions by {report.model.name} version {report.model.version}, errors first; all "
        f"predictions are in `{report.predictions.path}` version {report.predictions.version}"
    )
    if report.inputs:
        about += f", their files in `{report.inputs.path}`"
    if report.unreadable:
        about += f". {report.unreadable} files cannot be read"
    if report.unlearned:
        named = join_names(list(report.unlearned[:NUM_NAMED]), len(report.unlearned))
        about += f". The model was trained without {markdown_text(named)}, whose images get other labels"
    rows = [
        in_cells(
            {
                "path": image.path,
                "label": image.label or "",
                "probability": "" if image.probability is None else f"{image.probability:.4f}",
                "error": image.error or "",
            }
        )
        for image in report.least_confident
    ]
    create_table_artifact(table=rows, key="predictions", description=about)
