"""Streaming inference as a Prefect task, with one table artifact of its progress."""

import json
from collections.abc import Callable
from uuid import UUID

from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from tasks.config.prediction import PredictConfig, StreamConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.orchestration.progress_artifacts import LatestWriter
from tasks.orchestration.stage import skipped, stage
from tasks.predict.task import publish_predictions
from tasks.refs import StreamReport
from tasks.storage import Storage
from tasks.stream.predict import predict_stream
from tasks.text.markup import in_cells

UPDATE_SECONDS = 15.0
"""Minimum interval between two updates of the artifact while the stream runs."""


@stage("predict-stream", timeout_in="stream")
def predict_changes(
    stream: StreamConfig, predict: PredictConfig, promote: PromoteConfig, storage: Storage, spark_config: SparkConfig
) -> StreamReport:
    """Predict the images that were added since the last run."""
    artifact = StreamArtifact()
    writer = LatestWriter(artifact.write, UPDATE_SECONDS)
    try:
        report = predict_stream(
            stream, predict, promote, storage, spark_config, lambda measure: writer.put("stream", measure)
        )
    finally:
        writer.end()
    artifact.write("stream", lambda: report)
    publish_predictions(report)
    return report if report.batches else skipped(report, "nothing has changed since the last run")


class StreamArtifact:
    """The table artifact of what a run has done, and how far the stream is behind."""

    def __init__(self) -> None:
        self._created: UUID | None = None

    def write(self, key: str, measure: Callable[[], StreamReport]) -> None:
        """Create or update the artifact."""
        report = measure()
        rows = [in_cells(progress_row(report))]
        about = f"Rows merged into `{report.predictions.path}`, now version {report.predictions.version}"
        if self._created is None:
            self._created = UUID(str(create_table_artifact(rows, key, about)))
            return
        with get_client(sync_client=True) as client:  # Prefect's own functions update only progress artifacts.
            update = ArtifactUpdate(data=json.dumps(rows), description=about)
            client.update_artifact(artifact_id=self._created, artifact=update)


def progress_row(report: StreamReport) -> dict[str, str]:
    """Return what a run has done, and how far the stream is behind, by the names of the artifact's columns."""
    behind = [(report.versions_behind, "versions"), (report.files_behind, "files")]
    return {
        "model": f"{report.model.name} version {report.model.version}",
        "batches": str(report.batches),
        "images predicted": str(report.predicted),
        "errors": str(report.errors),
        "files that cannot be read": str(report.unreadable),
        "images/s": f"{report.predicted / report.seconds:.0f}" if report.predicted else "",
        "behind": ", ".join(f"{num} {unit}" for num, unit in behind if num) or "none",
        "oldest not processed": f"{report.seconds_behind:.0f} s" if any(num for num, _unit in behind) else "none",
    }
