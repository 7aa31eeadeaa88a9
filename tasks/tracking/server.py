"""The MLflow tracking server or database: its creation, client, set-up, and checks that it answers."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import filelock
import requests
from mlflow import MlflowClient
from mlflow.entities import Experiment, Metric, RunTag
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from mlflow.tracking._tracking_service.utils import _get_store
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy import make_url

from tasks.credentials import without_credentials
from tasks.errors import AccessDenied, TrackingUnavailable, WrongInput
from tasks.paths import is_inside, local_path
from tasks.storage import Storage, artifacts_folder, tracking_file
from tasks.system.home import PRIVATE_FILE, is_shared, make_home, make_private_file
from tasks.tracking.experiments import DATA, TRAINING, prepare_experiment, run_list
from tasks.tracking.moved_home import follow_home

EXPERIMENT = TRAINING.name

TRAINING_RESUMES, WORK_IS_KEPT = "training resumes from its checkpoint", "which completes the work"
"""What follows from another run, for the messages about an outage."""

FIRST_RETRIES = 2
"""Retries of the first request, for which the user waits; MLflow's default of seven, with exponential backoff, is for
runs that have something to lose."""

FIRST_TIMEOUT_SECONDS = 10
"""Timeout of the first request."""

ACCESS_DENIED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
"""MLflow's codes of a server's answers 401 and 403."""

LOG_IN = (
    "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, of a user who may write, "
    "in the environment of this process and of every worker"
)

Found = TypeVar("Found")


def client_of(storage: Storage) -> MlflowClient:
    """Return an MLflow client of a storage, for runs and registry, after the database of a moved home was adapted.

    A process may use MLflow for other work as well. So neither the URIs of MLflow's fluent API nor its active run are
    read or changed: its functions, such as `mlflow.start_run`, are not used in this package. The database is checked at
    each call, about 5 ms, since another machine may open the home at another path: files would then be written there.

    Raises:
        WrongInput: The home was moved or copied, and its database cannot be written.
    """
    client = MlflowClient(tracking_uri=storage.tracking, registry_uri=storage.tracking)
    if (home := _home_of_database(storage)) is not None:
        follow_home(home / "mlflow.db")
    return client


def log_metrics(storage: Storage, run_id: str, metrics: Sequence[Metric], tags: Sequence[RunTag] = ()) -> None:
    """Log metrics and tags of a run in one transaction.

    Not by MLflow's client, which adds the model that the process has set as active to each metric.
    """
    _get_store(storage.tracking).log_batch(run_id, metrics, [], tags)


def found_or_none(find: Callable[..., Found], *names: str) -> Found | None:
    """Return the result of a lookup by MLflow's client, or None if the server does not have it."""
    try:
        return find(*names)
    except MlflowException as error:
        if not is_missing(error):
            raise
        return None


def is_missing(error: MlflowException) -> bool:
    """Return whether MLflow does not have what a request names; the second code is that of an invalid id or name."""
    return error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def database_file(storage: Storage) -> Path | None:
    """Return the file of the tracking database; None for a server or a database in memory."""
    if not storage.tracking.startswith("sqlite:"):
        return None
    name = make_url(storage.tracking).database
    return Path(name).absolute() if name else None


def _home_of_database(storage: Storage) -> Path | None:
    """Return the home whose database is used, that of the run or of its stack; None for a server or another one."""
    file = database_file(storage)
    return file.parent if file is not None and storage.tracking == tracking_file(str(file.parent)) else None


def prepare_database(storage: Storage) -> None:
    """Create the file of the tracking database if it is missing; a server or another database is left alone."""
    if storage.tracking.startswith("sqlite:///") and not re.search(r"[?]|:memory:", storage.tracking):
        if (home := _home_of_database(storage)) is not None:
            make_home(home)
        create_database(Path(storage.tracking.removeprefix("sqlite:///")), private=home is not None)


def prepare_tracking(storage: Storage) -> str:
    """Create database and experiment if they are missing, and return the experiment's id.

    Call it once before anything runs in parallel: processes that create the same experiment would race.

    Raises:
        ExperimentDeleted: As `prepare_experiment`.
    """
    prepare_database(storage)
    return prepare_experiment(client_of(storage), TRAINING, _artifact_location(storage))


def prepare_writing(storage: Storage) -> Experiment:
    """Prepare tracking, and return the experiment of the training runs, whose artifacts can be written.

    Raises:
        WrongInput: They are elsewhere than `storage.artifacts`, or in a folder that this machine does not have, which
            MLflow would create.
    """
    client = client_of(storage)
    experiment = client.get_experiment(prepare_tracking(storage))
    if storage.chosen_artifacts and str(experiment.artifact_location) != _artifact_location(storage):
        raise WrongInput(
            f"storage.artifacts is '{storage.artifacts}', but the experiment '{EXPERIMENT}' of "
            f"'{storage.tracking_shown}' keeps its artifacts in '{experiment.artifact_location}'",
            setting="storage.artifacts",
            way_out="restore the former value of the setting, or track elsewhere",
        )
    folder, home = local_path(experiment.artifact_location), _home_of_database(storage)
    if folder is None or folder.is_dir() or (home is not None and is_inside(str(folder), os.path.realpath(home))):
        return experiment
    is_foreign = storage.server_keeps_artifacts and not is_inside(str(folder), os.path.realpath(storage.home))
    if is_foreign or client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'", max_results=1):
        raise WrongInput(
            f"the experiment '{experiment.name}' of '{storage.tracking_shown}' keeps its artifacts in '{folder}', "
            f"which is not a folder on this machine, whose home is '{storage.home}'",
            way_out="bring it back to that path or mount it there, or track elsewhere",
        )
    return experiment


def prepare_data_tracking(storage: Storage) -> str:
    """Create the experiment of the data validations if it is missing, and return its id.

    Its artifacts have the same location as those of the training runs, or that of the server for a new experiment.
    """
    training = prepare_writing(storage)
    location = _artifact_location(storage) and str(training.artifact_location)
    return prepare_experiment(client_of(storage), DATA, location)


def runs_location(storage: Storage) -> str:
    """Return the path of the list of all training runs in MLflow's UI."""
    return run_list(prepare_tracking(storage))


def _artifact_location(storage: Storage) -> str | None:
    """Return the location of a new experiment's artifacts; None for that of the tracking server."""
    if storage.server_keeps_artifacts:
        return None
    # By default beside the database, with which they are moved.
    location = storage.chosen_artifacts or artifacts_folder(str(_home_of_database(storage) or storage.home))
    path = local_path(location)
    # The store that Hadoop calls s3a is s3 for MLflow.
    return re.sub("^s3a://", "s3://", location) if path is None else path.as_uri()


@contextmanager
def translate_outage(storage: Storage, way_out: str = TRAINING_RESUMES) -> Iterator[None]:
    """Convert MLflow's errors about a server or database that does not answer into one sentence.

    Args:
        storage: Storage with the tracking URI.
        way_out: End of the message.

    Raises:
        TrackingUnavailable: The server or database does not answer.
        AccessDenied: The server denies access.
    """
    try:
        yield
    except MlflowException as error:
        server = f"the tracking server '{storage.tracking_shown}'"
        message = " ".join(without_credentials(str(error)).split())
        # `from None`: a traceback would show the text of the original error, with its credentials.
        if error.error_code in ACCESS_DENIED:
            raise AccessDenied(f"{server} denies access ({message})", way_out=LOG_IN) from None
        if not _is_unavailable(error):
            raise
        raise TrackingUnavailable(
            f"{server} does not answer ({message})", way_out=f"fix it and run again, {way_out}"
        ) from None


def _is_unavailable(error: MlflowException) -> bool:
    # MLflow's client signals an outage of a server only by the context of its error, an error of its HTTP library.
    unanswered = isinstance(error.__context__, requests.RequestException)
    return unanswered or bool(error.error_code == "TEMPORARILY_UNAVAILABLE")  # its code for a database


def _ping(storage: Storage) -> None:
    """Send a first request to the server, with a short timeout unless the environment sets MLflow's own.

    Raises:
        MlflowException: The server does not answer.
    """
    if not storage.tracking.startswith("http"):
        return
    # Any answer will do: MLflow's client interprets those of later requests.
    http_request(
        get_default_host_creds(storage.tracking),
        "/api/2.0/mlflow/experiments/get-by-name",
        "GET",
        params={"experiment_name": EXPERIMENT},
        max_retries=None if MLFLOW_HTTP_REQUEST_MAX_RETRIES.is_set() else FIRST_RETRIES,
        timeout=None if MLFLOW_HTTP_REQUEST_TIMEOUT.is_set() else FIRST_TIMEOUT_SECONDS,
    )


@contextmanager
def reachable(storage: Storage) -> Iterator[None]:
    """Check that the tracking server answers, which takes seconds if it does not, and translate its outages inside.

    Raises:
        TrackingUnavailable: The server or database does not answer, before the block or in it.
    """
    with translate_outage(storage, WORK_IS_KEPT):
        _ping(storage)
        yield


def is_available(storage: Storage) -> bool:
    """Return whether the tracking server answers within seconds; True for a database."""
    try:
        _ping(storage)
    except MlflowException:
        return False
    return True


def check_tracking(storage: Storage, *, data: bool = False) -> None:
    """Check that the tracking server or database answers, and that artifacts can be written where it keeps them.

    Args:
        storage: Storage with the tracking URI.
        data: Whether the experiment of the data validations is needed, too.

    Raises:
        WrongInput: It does not answer, denies access, or answers with an error; otherwise as `prepare_writing`.
    """
    try:
        _ping(storage)
        (prepare_data_tracking if data else prepare_writing)(storage)
    except MlflowException as error:
        what, way_out = "answers with an error", "give the address of an MLflow server"
        if error.error_code in ACCESS_DENIED:
            what, way_out = "denies access", LOG_IN
        elif _is_unavailable(error):
            what, way_out = "does not answer", "start the MLflow server"
        # `from None`: a traceback would show the text of the original error, with its credentials.
        raise WrongInput(
            f"storage.tracking is '{storage.tracking_shown}', which {what} ({without_credentials(str(error))})",
            setting="storage.tracking",
            way_out=f"{way_out}, or leave the setting empty for a database file",
        ) from None


def create_database(database: Path, *, private: bool) -> None:
    """Create MLflow's tables in a file with another name, and rename it, unless the database exists.

    SQLite does not undo the changes of a migration whose process is killed, and MLflow can neither use such a database
    nor complete it. Processes that start together wait for the first one.

    Args:
        database: The file.
        private: Whether only its owner may read it, unless the folder is shared.
    """
    if _is_complete(database):
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    lock = database.with_name(f"{database.name}.lock")
    # Each user of a shared folder may be the first.
    with filelock.FileLock(lock, mode=PRIVATE_FILE if private and not is_shared(database.parent) else 0o666):
        if not _is_complete(database):
            _create_file(database, private=private)
        with suppress(PermissionError):  # of another user, in a folder that keeps the files of each
            lock.unlink(missing_ok=True)  # A process that waits for it finds the database.


def _create_file(database: Path, *, private: bool) -> None:
    new = database.with_name(f"{database.name}.new")
    for left in database.parent.glob(f"{new.name}*"):  # by a process that was killed, with SQLite's journal
        left.unlink()
    if private:
        make_private_file(new)
    _get_store(f"sqlite:///{new}").engine.dispose()
    new.replace(database)


def _is_complete(database: Path) -> bool:
    return database.is_file() and database.stat().st_size > 0


def all_results(search: Callable[[str | None], PagedList[Found]]) -> Iterator[Found]:
    """Yield the results of all pages.

    Args:
        search: Returns the page of a token; None is the first one.
    """
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
