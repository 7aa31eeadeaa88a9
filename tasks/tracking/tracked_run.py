"""An open MLflow run: its metrics, tables, figures, datasets and model."""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import RunStatus
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from tasks.errors import TrackingUnavailable
from tasks.storage import Storage
from tasks.tracking.datasets import TrainingData, dataset_inputs
from tasks.tracking.description import DESCRIPTION_TAG, MAX_RUN_DESCRIPTION, fit_description
from tasks.tracking.logged_model import log_package
from tasks.tracking.runs import CODE_TAG, CONFIG_FILE, KEY_TAG, artifact_names, code_commit, flat_params, version_params
from tasks.tracking.server import prepare_tracking, translate_outage

logger = logging.getLogger("lakevision.tracking")

DATASET_ATTEMPTS = 5
"""Attempts to log the datasets of a run while other runs log the same ones."""

UNIQUE_VIOLATED = re.compile(r"unique constraint|duplicate (key|entry)", re.IGNORECASE)
"""Message of SQLite, PostgreSQL or MySQL about a row that another process has just added."""


@dataclass(frozen=True)
class TrackedRun:
    """A running MLflow run."""

    run_id: str
    code_version: str | None = None
    """Commit of the code that started the run, if it is known."""
    params: dict[str, str] = field(default_factory=dict)
    """Parameters of the run when it was opened; empty for a new run."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at a step, except those that the run already has with the same values."""
        existing = mlflow.get_run(self.run_id).data.metrics
        new = {name: value for name, value in metrics.items() if existing.get(name) != value}
        mlflow.log_metrics(new, step=step, run_id=self.run_id)

    def log_table(self, rows: dict[str, list[Any]], name: str) -> None:
        """Log a table, given as columns by name, as JSON that the UI shows; an existing table is replaced."""
        if name in artifact_names(self.run_id):
            # MLflow would append to it, so that a resumed run would have each row twice.
            data = [list(row) for row in zip(*rows.values(), strict=True)]
            mlflow.log_dict({"columns": list(rows), "data": data}, name, run_id=self.run_id)
        else:
            mlflow.log_table(rows, name, run_id=self.run_id)

    def log_figure(self, figure: Any, name: str) -> None:
        """Log a matplotlib figure."""
        with warnings.catch_warnings():
            # The font lacks some scripts, and matplotlib logs a line for each of their letters.
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            mlflow.log_figure(figure, name)

    def log_text(self, text: str, name: str) -> None:
        """Log a text file."""
        mlflow.log_text(text, name, run_id=self.run_id)

    def log_data(self, data: TrainingData) -> None:
        """Log the training data as datasets of the run; a resumed run keeps those that it has."""
        for attempts_left in reversed(range(DATASET_ATTEMPTS)):
            try:
                mlflow.MlflowClient().log_inputs(self.run_id, datasets=dataset_inputs(data))
            except MlflowException as error:
                # MLflow looks for a dataset before it adds it: another run on the same data may add it in between.
                if not attempts_left or not UNIQUE_VIOLATED.search(str(error)):
                    raise
            else:
                return

    def describe(self, text: str) -> None:
        """Set the run's description, in Markdown, which is shown at the top of its page."""
        mlflow.MlflowClient().set_tag(self.run_id, DESCRIPTION_TAG, fit_description(text, MAX_RUN_DESCRIPTION))

    def log_folder(self, folder: Path, name: str) -> None:
        """Log the files of a folder into the folder `name` of the artifacts."""
        mlflow.log_artifacts(str(folder), name, run_id=self.run_id)

    def log_model(self, folder: Path) -> None:
        """Log the model package with the files that `save_classifier` wrote into `folder`."""
        log_package(self.run_id, folder)


@contextmanager
def tracked_run(
    storage: Storage, name: str, key: str, config: dict[str, Any], tags: dict[str, str], resume: str | None
) -> Iterator[TrackedRun]:
    """Open a new MLflow run, or resume one; it ends as finished, failed or killed.

    Args:
        storage: Storage with the tracking URI.
        name: Name of a new run.
        key: Key of the inputs, by which `find_unfinished_run` and `find_finished_run` find the run.
        config: Settings of the training run; a resumed run keeps the values that it already has.
        tags: Tags in addition to that of the key.
        resume: Id of the run to resume, or None.

    Raises:
        TrackingUnavailable: The server does not answer, here or within the context.
        BaseException: Any error raised within the context, also if the server does not accept the final status.
    """
    # Samples for runs of a few seconds, too: by default MLflow takes one every 10 s and none at the end.
    os.environ.setdefault("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "2")
    mlflow.enable_system_metrics_logging()
    # Created with its key, so that the run of a killed process can always be found.
    key_and_tags = {KEY_TAG: key, **tags}
    within: BaseException | None = None
    try:
        with (
            translate_outage(storage),  # outside, since setting the final status sends a request as well
            mlflow.start_run(resume, prepare_tracking(storage), None if resume else name, tags=key_and_tags) as run,
        ):
            tracked = _described(run, config)
            try:
                yield tracked
            except BaseException as raised:
                within = raised
                if isinstance(raised, KeyboardInterrupt):
                    mlflow.end_run(RunStatus.to_string(RunStatus.KILLED))
                raise
    except TrackingUnavailable as away:
        if within in (None, away) or isinstance(within, MlflowException):
            raise
        logger.warning("MLflow run %s is left as running: %s", tracked.run_id, away)
    if within is not None:
        raise within


def _described(run: mlflow.ActiveRun, config: dict[str, Any]) -> TrackedRun:
    given = flat_params(config) | version_params()
    missing = {name: value for name, value in given.items() if name not in run.data.params}
    tracked = TrackedRun(run.info.run_id, run.data.tags.get(CODE_TAG) or code_commit(), dict(run.data.params))
    if missing:
        # The parameters last: if the process is killed before, the next one finds them missing.
        mlflow.log_dict(config, CONFIG_FILE)
        if tracked.code_version:
            mlflow.set_tag(CODE_TAG, tracked.code_version)
        mlflow.log_params(missing)
    return tracked


def resume_system_metrics(run_id: str) -> None:
    """Restart MLflow's thread for system metrics of a run if it has ended, since the server did not accept a sample."""
    monitors = mlflow.tracking.fluent.run_id_to_system_metrics_monitor
    monitor = monitors.get(run_id)
    if monitor is None or monitor._process is None or monitor._process.is_alive():
        return
    monitor.finish()
    monitors[run_id] = SystemMetricsMonitor(run_id, resume_logging=True)
    monitors[run_id].start()
