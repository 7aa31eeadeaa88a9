"""Streaming inference as a Prefect task."""

from prefect.artifacts import create_table_artifact

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.config.stream import StreamConfig
from tasks.orchestration.task import skipped, stage
from tasks.refs import StreamReport
from tasks.storage import Storage
from tasks.stream.predict import predict_stream
from tasks.text.markup import in_cells


@stage("predict-stream", timeout_in="stream")
def predict_changes(
    stream: StreamConfig, predict: PredictConfig, promote: PromoteConfig, storage: Storage, spark_config: SparkConfig
) -> StreamReport:
    """Predict the images that were added since the last run."""
    report = predict_stream(stream, predict, promote, storage, spark_config)
    publish_progress(report)
    return report if report.batches else skipped(report, "nothing has changed since the last run")


def publish_progress(report: StreamReport) -> None:
    """Create the table artifact of what a run did, and how far the stream is behind."""
    row = {
        "model": f"{report.model.name} version {report.model.version}",
        "batches": str(report.batches),
        "images predicted": str(report.predicted),
        "errors": str(report.errors),
        "images/s": f"{report.predicted / report.seconds:.0f}" if report.predicted else "",
        "versions behind": str(report.versions_behind),
        "oldest change not processed": f"{report.seconds_behind:.0f} s" if report.versions_behind else "none",
    }
    about = f"Rows merged into `{report.predictions.path}`, now version {report.predictions.version}"
    create_table_artifact(table=[in_cells(row)], key="stream", description=about)
