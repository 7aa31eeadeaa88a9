"""The tracking server or database: prepared once, and refused where it does not answer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlflow
import requests
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy import make_url

from tasks.credentials import without_credentials
from tasks.errors import TrackingAway, WrongInput
from tasks.paths import local_path
from tasks.storage import Storage, artifacts_folder, tracking_file
from tasks.system.home import make_home, make_private_file
from tasks.tracking.experiments import DATA, TRAINING, prepare_experiment, run_list

EXPERIMENT = TRAINING.name

FIRST_RETRIES = 2
"""How often a server is asked again before work starts: a person waits for the answer. MLflow's seven, each after twice
the time of the one before, are for a run that has something to lose."""

FIRST_TIMEOUT_SECONDS = 10
"""How long it may take to answer then."""


def client_of(storage: Storage) -> mlflow.MlflowClient:
    """Return MLflow's client of this storage's tracking, which MLflow's own functions use from now on as well."""
    # MLflow's own progress bars and hints are written for a notebook.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    mlflow.set_tracking_uri(storage.tracking)
    return mlflow.MlflowClient(tracking_uri=storage.tracking)


def database_folder(storage: Storage) -> Path | None:
    """Return the folder of the tracking database where that is a file, or None."""
    if not storage.tracking.startswith("sqlite:"):
        return None
    name = make_url(storage.tracking).database
    return Path(name).absolute().parent if name else None


def prepare_tracking(storage: Storage) -> str:
    """Create database and experiment where they are missing, and return the experiment's id.

    Called once before anything runs in parallel: two processes that make one SQLite database race.
    """
    if storage.tracking.startswith("sqlite:///"):
        database = Path(storage.tracking.removeprefix("sqlite:///"))
        if storage.tracking == tracking_file(str(database.parent)):  # that of a home, this run's or its stack's
            make_home(database.parent)
            make_private_file(database)
        database.parent.mkdir(parents=True, exist_ok=True)
    return prepare_experiment(client_of(storage), TRAINING, _artifact_location(storage))


def prepare_data_tracking(storage: Storage) -> str:
    """Create the experiment of the data validations where it is missing, and return its id.

    Its artifacts lie where those of the training runs lie.
    """
    client = client_of(storage)
    training = client.get_experiment(prepare_tracking(storage))
    return prepare_experiment(client, DATA, str(training.artifact_location))


def runs_location(storage: Storage) -> str:
    """Return where MLflow's UI lists all training runs with their metrics."""
    return run_list(prepare_tracking(storage))


def _artifact_location(storage: Storage) -> str:
    path = local_path(storage.artifacts)
    return storage.artifacts if path is None else path.as_uri()


@contextmanager
def away_named(storage: Storage) -> Iterator[None]:
    """Turn what MLflow makes of a server or database that does not answer into one sentence.

    Raises:
        TrackingAway: Names it and the way out.
    """
    try:
        yield
    except MlflowException as error:
        if not _is_away(error):
            raise
        said = " ".join(without_credentials(str(error)).split())
        # Not from the error itself, whose text a traceback would show as it is.
        raise TrackingAway(
            f"the tracking server '{storage.tracking_shown}' does not answer ({said}): mend it and run again, what was "
            "trained is in its checkpoint"
        ) from None


def _is_away(error: MlflowException) -> bool:
    # MLflow's client gives no other sign than the error of its HTTP library, on whose account it raises its own.
    unanswered = isinstance(error.__context__, requests.RequestException)
    return unanswered or bool(error.error_code == "TEMPORARILY_UNAVAILABLE")  # so it says of a database


def _ask_first(storage: Storage) -> None:
    """Ask a server whether it is there, for seconds and not for minutes, unless the environment says how long.

    Raises:
        MlflowException: It does not answer.
    """
    if not storage.tracking.startswith("http"):
        return
    # Any answer will do: what it means is for MLflow's client, which asks after this.
    http_request(
        get_default_host_creds(storage.tracking),
        "/api/2.0/mlflow/experiments/get-by-name",
        "GET",
        params={"experiment_name": EXPERIMENT},
        max_retries=None if MLFLOW_HTTP_REQUEST_MAX_RETRIES.is_set() else FIRST_RETRIES,
        timeout=None if MLFLOW_HTTP_REQUEST_TIMEOUT.is_set() else FIRST_TIMEOUT_SECONDS,
    )


def answers(storage: Storage) -> bool:
    """Say whether the tracking server answers, where there is one, within seconds."""
    try:
        _ask_first(storage)
    except MlflowException:
        return False
    return True


def check_tracking(storage: Storage) -> None:
    """Refuse a tracking server or database that does not answer, or that keeps its artifacts elsewhere.

    Raises:
        WrongInput: Names it and the way out.
    """
    try:
        _ask_first(storage)
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
