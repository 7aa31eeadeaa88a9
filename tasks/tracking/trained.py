"""Finished training runs as logged in MLflow: settings, provenance, metrics and model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import RunStatus
from mlflow.exceptions import MlflowException

from tasks.credentials import without_credentials
from tasks.errors import WrongInput
from tasks.model_package.description import WEIGHTS_FILE
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.classifier_files import OLD_MODEL_TAG
from tasks.tracking.files import read_json, repository
from tasks.tracking.models import whole_model
from tasks.tracking.runs import (
    BATCH_SIZE_TAG,
    CODE_TAG,
    CONFIG_FILE,
    RESUMED_WITH_CHANGES_TAG,
    versions_in,
)
from tasks.tracking.server import EXPERIMENT, client_of, prepare_tracking
from tasks.tracking.trained_tables import TABLE_PARAM

REPEAT_TAG = "lakevision.repeat_of"
"""Tag of a repeated training run with the id of the original run."""


@dataclass(frozen=True)
class LoggedTraining:
    """Settings, provenance and metrics of a finished training run in MLflow."""

    run_id: str
    config: dict[str, Any]
    """Content of `config.json`."""
    versions: dict[str, str]
    """Versions of packages, by name."""
    code_version: str | None
    metrics: dict[str, float]
    batch_sizes: dict[str, str]
    """Automatically chosen batch sizes, by the number of the phase."""
    resumed_with_changes: str | None = None
    """Differences in provenance with which the run was resumed, if any."""


def logged_training(storage: Storage, run_id: str) -> LoggedTraining:
    """Return what a finished training run logged.

    Raises:
        WrongInput: The run does not exist, has not finished, or is not a training run.
    """
    way_out = "give a finished run of the flow train, train-distributed or tune"
    try:
        run = client_of(storage).get_run(run_id)
    except MlflowException as error:
        message = without_credentials(str(error))
        raise WrongInput(
            f"run_id is '{run_id}', which '{storage.tracking_shown}' does not have ({message}): {way_out}"
        ) from None
    if run.info.status != RunStatus.to_string(RunStatus.FINISHED):
        raise WrongInput(f"run_id is '{run_id}', whose status is {run.info.status}: {way_out}")
    if OLD_MODEL_TAG in run.data.tags:
        raise WrongInput(f"run_id is '{run_id}', whose model is of release 0.1.0 and cannot be compared: {way_out}")
    if "test_accuracy" not in run.data.metrics:
        raise WrongInput(f"run_id is '{run_id}', which is not a training run: {way_out}")
    config = read_json(storage, run_id, CONFIG_FILE)
    if TABLE_PARAM in run.data.params and "table" in config.get("data", {}):
        config["data"]["table"] = run.data.params[TABLE_PARAM]  # Of a moved home, the parameter has the new path.
    batch_sizes = {
        name.removeprefix(BATCH_SIZE_TAG): value
        for name, value in run.data.tags.items()
        if name.startswith(BATCH_SIZE_TAG)
    }
    return LoggedTraining(
        run_id=run_id,
        config=config,
        versions=versions_in(run.data.params),
        code_version=run.data.tags.get(CODE_TAG),
        metrics=dict(run.data.metrics),
        batch_sizes=batch_sizes,
        resumed_with_changes=run.data.tags.get(RESUMED_WITH_CHANGES_TAG),
    )


def newest_training(storage: Storage) -> RunRef:
    """Return the newest finished training run that is not a repetition.

    Raises:
        WrongInput: No training run has finished.
    """
    runs = client_of(storage).search_runs(
        [prepare_tracking(storage)],
        "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
        order_by=["attributes.start_time DESC"],
    )
    for run in runs:
        if not {REPEAT_TAG, OLD_MODEL_TAG} & run.data.tags.keys():
            return RunRef(run_id=run.info.run_id)
    raise WrongInput(
        f"run_id is empty, and the experiment '{EXPERIMENT}' of '{storage.tracking_shown}' has no finished "
        "training run: run the flow train first"
    )


def download_weights(storage: Storage, run: RunRef, folder: Path) -> Path:
    """Copy the model that a run logged into `folder`, and return the file with its weights.

    Raises:
        WrongInput: The run has logged no model.
    """
    model_id = whole_model(storage, run)
    if model_id is None:
        raise WrongInput(f"run_id is '{run.run_id}', which has logged no model: give another run")
    files = repository(storage, client_of(storage).get_logged_model(model_id).artifact_location)
    package = folder / run.run_id
    package.mkdir(parents=True, exist_ok=True)
    return next(Path(files.download_artifacts("", str(package))).rglob(WEIGHTS_FILE))
