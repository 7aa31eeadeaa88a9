"""MLflow runs: trainings and data validations, written, found again and ended."""

import logging
import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.entities import Run, RunStatus, ViewType
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, Schema

import tasks
from tasks.environment import code_version
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.server import client_of, prepare_tracking

logger = logging.getLogger("lakevision.tracking")

KEY_TAG = "lakevision.key"

CHECKS_FILE = "data_validation.json"

CONFIG_FILE = "config.json"
"""What a training was given: enough to do it again."""

CODE_TAG = "lakevision.code_version"

VERSION_PARAM = "version."
"""What the parameters that say packages' versions begin with."""

FLOW_RUN_TAG = "prefect.flow_run_id"

LOGGED_PACKAGES = (
    "torch",
    "torchvision",
    "horovod",
    "petastorm",
    "pyspark",
    "delta-spark",
    "mlflow",
    "prefect",
    "numpy",
    "pyarrow",
    "pillow",
)

MODEL_PACKAGES = ("mlflow", "torch", "torchvision", "numpy", "pandas", "pillow", "pydantic")
"""What the model package imports; stated, since MLflow would otherwise export the whole project's lock."""

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


def find_finished_run(storage: Storage, key: str) -> RunRef | None:
    """Return the finished run of exactly these inputs, or None."""
    runs = runs_with_key(storage, key)
    finished = [run for run in runs if run.info.status == RunStatus.to_string(RunStatus.FINISHED)]
    return RunRef(run_id=finished[0].info.run_id) if finished else None


def has_run(storage: Storage, run_id: str) -> bool:
    """Say whether the tracking server knows the run and nobody deleted it."""
    try:
        found = client_of(storage).get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return bool(found.info.lifecycle_stage == "active")


def runs_with_key(storage: Storage, key: str) -> list[Run]:
    """Return the runs of exactly these inputs that nobody deleted, the newest first."""
    experiment = prepare_tracking(storage)
    return list(
        client_of(storage).search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", run_view_type=ViewType.ACTIVE_ONLY)
    )


def end_abandoned_runs(storage: Storage, key: str, keep: str | None) -> None:
    """Mark runs of this key as killed that no process can still be writing; the caller holds the key's lock."""
    for run in runs_with_key(storage, key):
        if run.info.status == RunStatus.to_string(RunStatus.RUNNING) and run.info.run_id != keep:
            logger.info("MLflow run %s was abandoned by a killed process: marked as killed", run.info.run_id)
            client_of(storage).set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a training may depend on."""
    return {package: version(package) for package in LOGGED_PACKAGES}


def code_commit() -> str | None:
    """Return the commit of the checkout this code lies in, or what the image says."""
    if given := code_version():
        return given
    command = ["git", "-C", str(Path(tasks.__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def flat_params(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as MLflow's parameters: names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flat_params(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


@dataclass(frozen=True)
class TrackedRun:
    """A running MLflow run."""

    run_id: str
    code_version: str | None = None
    """The commit of the code that began it, where it is known."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics of an epoch."""
        mlflow.log_metrics(metrics, step=step, run_id=self.run_id)

    def log_table(self, rows: dict[str, list[Any]], name: str) -> None:
        """Log a table, columns by name, as JSON that the UI shows; one of that name is replaced."""
        if name in _artifacts(self.run_id):
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

    def log_folder(self, folder: Path, name: str) -> None:
        """Log the files of a folder into the folder `name` of the artifacts."""
        mlflow.log_artifacts(str(folder), name, run_id=self.run_id)

    def log_model(self, folder: Path) -> None:
        """Log the model package around what `save_classifier` wrote into `folder`."""
        package = Path(tasks.__file__).parent
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
    """Open an MLflow run, or go on with the run `resume`; it ends as finished, failed or killed."""
    experiment = prepare_tracking(storage)
    # A training of a few seconds has samples, too; MLflow takes one every 10 s and none at the end.
    os.environ.setdefault("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "2")
    mlflow.enable_system_metrics_logging()
    with mlflow.start_run(run_id=resume, experiment_id=experiment, run_name=None if resume else name) as run:
        tracked = TrackedRun(run.info.run_id, run.data.tags.get(CODE_TAG) if resume else code_commit())
        mlflow.set_tags({KEY_TAG: key, **tags})
        if resume is None:
            mlflow.log_params(flat_params(config))
            mlflow.log_params({f"{VERSION_PARAM}{package}": found for package, found in package_versions().items()})
            mlflow.log_dict(config, CONFIG_FILE)
            if tracked.code_version:
                mlflow.set_tag(CODE_TAG, tracked.code_version)
        try:
            yield tracked
        except KeyboardInterrupt:
            mlflow.end_run(RunStatus.to_string(RunStatus.KILLED))
            raise


def log_data_checks(
    storage: Storage,
    key: str,
    checks: dict[str, Any],
    tables: dict[str, list[dict[str, Any]]],
    metrics: dict[str, float],
    tags: dict[str, str],
) -> RunRef:
    """Log what a version of the tables holds as a run of its own; tables without rows are left out."""
    end_abandoned_runs(storage, key, None)
    experiment, client = prepare_tracking(storage), client_of(storage)
    run = client.create_run(experiment, tags={KEY_TAG: key, **tags}, run_name="data-validation")
    run_id = run.info.run_id
    for name, value in metrics.items():
        client.log_metric(run_id, name, value)
    for name, rows in tables.items():
        if rows:
            client.log_table(run_id, {column: [row[column] for row in rows] for column in rows[0]}, f"{name}.json")
    # Last: a run that has finished has all of it.
    client.log_dict(run_id, checks, CHECKS_FILE)
    client.set_terminated(run_id)
    return RunRef(run_id=run_id)


def find_data_checks(storage: Storage, key: str) -> dict[str, Any] | None:
    """Return what `log_data_checks` logged under this key, or None."""
    found = find_finished_run(storage, key)
    if found is None:
        return None
    logged: dict[str, Any] = mlflow.artifacts.load_dict(f"runs:/{found.run_id}/{CHECKS_FILE}")
    return logged


def promotable_runs(storage: Storage) -> list[RunRef]:
    """Return the newest finished run and every other finished run on the same cache, the newest first."""
    experiment = prepare_tracking(storage)
    runs = client_of(storage).search_runs(
        [experiment],
        "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
        order_by=["attributes.start_time DESC"],
    )
    if not runs:
        return []
    digest = runs[0].data.params["cache.digest"]
    return [RunRef(run_id=run.info.run_id) for run in runs if run.data.params["cache.digest"] == digest]


def run_metrics(storage: Storage, run: RunRef) -> dict[str, float]:
    """Return the last value of every metric of a run."""
    return dict(client_of(storage).get_run(run.run_id).data.metrics)


def read_artifact(storage: Storage, run: RunRef, name: str) -> bytes | None:
    """Return the content of a file among the run's artifacts, or None where there is none of that name."""
    client = client_of(storage)
    if name not in _artifacts(run.run_id):
        return None
    with TemporaryDirectory() as scratch:
        return Path(client.download_artifacts(run.run_id, name, scratch)).read_bytes()


def _artifacts(run_id: str) -> set[str]:
    """Return the names of the files at the root of a run's artifacts."""
    return {file.path for file in mlflow.artifacts.list_artifacts(run_id=run_id)}


def run_location(storage: Storage, run: RunRef) -> str:
    """Return where a person finds the run: the experiment and run in MLflow's UI."""
    experiment = client_of(storage).get_run(run.run_id).info.experiment_id
    return f"/#/experiments/{experiment}/runs/{run.run_id}"
