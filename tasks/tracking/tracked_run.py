"""An MLflow run while it is written."""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.types import ColSpec, DataType, Schema

import tasks
from tasks.errors import TrackingAway
from tasks.storage import Storage
from tasks.tracking.classifier_files import file_digests
from tasks.tracking.datasets import TrainingData, dataset_inputs
from tasks.tracking.description import DESCRIPTION_TAG, MAX_RUN_DESCRIPTION, fit_description
from tasks.tracking.runs import CODE_TAG, CONFIG_FILE, KEY_TAG, artifact_names, code_commit, flat_params, version_params
from tasks.tracking.server import away_named, prepare_tracking

logger = logging.getLogger("lakevision.tracking")

MODEL_PACKAGES = ("mlflow", "torch", "torchvision", "numpy", "pandas", "pillow", "pydantic")
"""What the model package imports; stated, since MLflow would otherwise export the whole project's lock."""

DATASET_ATTEMPTS = 5
"""How often the datasets of a run are logged where other runs log the same ones at the same time."""

UNIQUE_VIOLATED = re.compile(r"unique constraint|duplicate (key|entry)", re.IGNORECASE)
"""What SQLite, PostgreSQL and MySQL say of a row that another process has just added."""

SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec(DataType.binary, "content")]),
    outputs=Schema(
        [
            ColSpec(DataType.string, "label", required=False),
            ColSpec(DataType.double, "probability", required=False),
            ColSpec(DataType.string, "error", required=False),
        ]
    ),
)


@dataclass(frozen=True)
class TrackedRun:
    """A running MLflow run."""

    run_id: str
    code_version: str | None = None
    """The commit of the code that began it, where it is known."""
    params: dict[str, str] = field(default_factory=dict)
    """Parameters that it had when it was opened; none of a new one."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics at a step, but for those that the run has already with these values."""
        there = mlflow.get_run(self.run_id).data.metrics
        new = {name: value for name, value in metrics.items() if there.get(name) != value}
        mlflow.log_metrics(new, step=step, run_id=self.run_id)

    def log_table(self, rows: dict[str, list[Any]], name: str) -> None:
        """Log a table, columns by name, as JSON that the UI shows; one of that name is replaced."""
        if name in artifact_names(self.run_id):
            # MLflow would append, and a training that was resumed here have each row twice.
            data = [list(row) for row in zip(*rows.values(), strict=True)]
            mlflow.log_dict({"columns": list(rows), "data": data}, name, run_id=self.run_id)
        else:
            mlflow.log_table(rows, name, run_id=self.run_id)

    def log_figure(self, figure: Any, name: str) -> None:
        """Log a matplotlib figure."""
        with warnings.catch_warnings():
            # Of a script that the font lacks each letter is an empty box, and a line in the log.
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            mlflow.log_figure(figure, name)

    def log_text(self, text: str, name: str) -> None:
        """Log a text file."""
        mlflow.log_text(text, name, run_id=self.run_id)

    def log_data(self, data: TrainingData) -> None:
        """Log what the run is trained on as its datasets; of a resumed run, those that it has stay."""
        for attempts_left in reversed(range(DATASET_ATTEMPTS)):
            try:
                mlflow.MlflowClient().log_inputs(self.run_id, datasets=dataset_inputs(data))
            except MlflowException as error:
                # MLflow looks for a dataset and then adds it: another run on the same data may come in between.
                if not attempts_left or not UNIQUE_VIOLATED.search(str(error)):
                    raise
            else:
                return

    def describe(self, text: str) -> None:
        """Make a Markdown text the run's description, which its page begins with."""
        mlflow.MlflowClient().set_tag(self.run_id, DESCRIPTION_TAG, fit_description(text, MAX_RUN_DESCRIPTION))

    def log_folder(self, folder: Path, name: str) -> None:
        """Log the files of a folder into the folder `name` of the artifacts."""
        mlflow.log_artifacts(str(folder), name, run_id=self.run_id)

    def log_model(self, folder: Path) -> None:
        """Log the model package around what `save_classifier` wrote into `folder`."""
        package = Path(tasks.__file__).parent
        # Noted here, where the files are the training's own: what is fetched later is checked by these.
        mlflow.MlflowClient().log_batch(
            self.run_id, tags=[RunTag(name, sha256) for name, sha256 in file_digests(folder).items()]
        )
        # An environment made by uv has no pip, which MLflow remarks on with every model.
        logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            # The signature is stated; an example picture in every model would add nothing to it.
            warnings.filterwarnings("ignore", message=".*input example.*", category=UserWarning)
            mlflow.pyfunc.log_model(
                name="model",
                python_model=str(package / "predict" / "pyfunc.py"),
                artifacts={"classifier": str(folder)},
                code_paths=[str(package)],
                signature=SIGNATURE,
                pip_requirements=[f"{name}=={version(name)}" for name in MODEL_PACKAGES],
            )


@contextmanager
def tracked_run(
    storage: Storage, name: str, key: str, config: dict[str, Any], tags: dict[str, str], resume: str | None
) -> Iterator[TrackedRun]:
    """Open an MLflow run, or go on with the run `resume`; it ends as finished, failed or killed.

    Args:
        storage: Where tracking lies.
        name: Name of a new run.
        key: Names the inputs; `find_begun_run` and `find_finished_run` look for it.
        config: What the training was given; of a run that is gone on with, what is there already stays.
        tags: Tags beside the key's.
        resume: Id of a run to go on with.

    Raises:
        TrackingAway: The server does not answer, here or in what is done within.
        BaseException: What is raised within, also where the server is not there to be told of the end.
    """
    # A training of a few seconds has samples, too; MLflow takes one every 10 s and none at the end.
    os.environ.setdefault("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "2")
    mlflow.enable_system_metrics_logging()
    # Named by its key from the first moment: no kill leaves a run that nobody finds.
    key_and_tags = {KEY_TAG: key, **tags}
    within: BaseException | None = None
    try:
        with (
            away_named(storage),  # Outside: a run is ended by a message, too.
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
    except TrackingAway as away:
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
        # The parameters last: where a process was killed on the way here, the next one finds some missing.
        mlflow.log_dict(config, CONFIG_FILE)
        if tracked.code_version:
            mlflow.set_tag(CODE_TAG, tracked.code_version)
        mlflow.log_params(missing)
    return tracked


def resume_system_metrics(run_id: str) -> None:
    """Go on with the machine's metrics of a running run, whose thread has ended: a server did not take a sample."""
    monitors = mlflow.tracking.fluent.run_id_to_system_metrics_monitor
    monitor = monitors.get(run_id)
    if monitor is None or monitor._process is None or monitor._process.is_alive():
        return
    monitor.finish()
    monitors[run_id] = SystemMetricsMonitor(run_id, resume_logging=True)
    monitors[run_id].start()
