"""The tracking server or database: prepared once, and refused where it does not answer."""

import os
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException

from tasks.credentials import without_credentials
from tasks.errors import WrongInput
from tasks.storage import Storage, artifacts_folder, local_path

EXPERIMENT = "lakevision"


def client_of(storage: Storage) -> mlflow.MlflowClient:
    """Return MLflow's client of this storage's tracking, which MLflow's own functions use from now on as well."""
    # MLflow's own progress bars and hints are written for a notebook.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    mlflow.set_tracking_uri(storage.tracking)
    return mlflow.MlflowClient(tracking_uri=storage.tracking)


def prepare_tracking(storage: Storage) -> str:
    """Create database and experiment where they are missing, and return the experiment's id.

    Called once before anything runs in parallel: two processes that make one SQLite database race.
    """
    if storage.tracking.startswith("sqlite:///"):
        Path(storage.tracking.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    client = client_of(storage)
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(EXPERIMENT, _artifact_location(storage)))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return str(client.get_experiment_by_name(EXPERIMENT).experiment_id)  # Another process was quicker.


def _artifact_location(storage: Storage) -> str:
    path = local_path(storage.artifacts)
    return storage.artifacts if path is None else path.as_uri()


def check_tracking(storage: Storage) -> None:
    """Refuse a tracking server or database that does not answer, or that keeps its artifacts elsewhere.

    Raises:
        WrongInput: Names it and the way out.
    """
    try:
        experiment = client_of(storage).get_experiment(prepare_tracking(storage))
    except MlflowException as error:
        said = without_credentials(str(error))
        # Not from the error itself, whose text a traceback would show as it is.
        raise WrongInput(
            f"storage.tracking is '{storage.tracking_shown}', which does not answer ({said}): start that MLflow "
            "server, or leave the setting empty for a database file"
        ) from None
    chosen = storage.artifacts != artifacts_folder(storage.home)
    if chosen and str(experiment.artifact_location) != _artifact_location(storage):
        raise WrongInput(
            f"storage.artifacts is '{storage.artifacts}', but the experiment '{EXPERIMENT}' of "
            f"'{storage.tracking_shown}' keeps its artifacts in '{experiment.artifact_location}': "
            "leave the setting as it was, or track elsewhere"
        )
