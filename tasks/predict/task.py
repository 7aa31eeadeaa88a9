"""Batch inference as a Prefect task."""

from prefect.artifacts import create_table_artifact

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import join_names
from tasks.orchestration.stage import skipped, stage
from tasks.predict.batch import predict_batch
from tasks.predict.champion import NUM_NAMED
from tasks.refs import ModelRef, PredictReport, TableRef
from tasks.storage import Storage
from tasks.text.markup import in_cells, markdown_text


@stage("predict", timeout_in="predict")
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
