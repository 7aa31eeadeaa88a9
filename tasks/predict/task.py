"""Batch inference as a Prefect task."""

from prefect.artifacts import create_markdown_artifact

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.orchestration.stage import skipped, stage
from tasks.predict.batch import predict_batch
from tasks.predict.shown import about_answers, answers_markdown
from tasks.refs import ModelRef, PredictReport, StreamReport, TableRef
from tasks.storage import Storage


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


def publish_predictions(report: PredictReport | StreamReport) -> None:
    """Create the artifact of the least confident predictions and of the failed files."""
    create_markdown_artifact(answers_markdown(report), key="predictions", description=about_answers(report))
