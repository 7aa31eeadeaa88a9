"""Finished trainings as they were logged: what they were given, what they gave, and their model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import RunStatus
from mlflow.exceptions import MlflowException

from tasks.credentials import without_credentials
from tasks.errors import WrongInput
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.models import whole_model
from tasks.tracking.runs import BATCH_SIZE_TAG, CODE_TAG, CONFIG_FILE, RESUMED_WITH_CHANGES_TAG, versions_in
from tasks.tracking.server import EXPERIMENT, client_of, prepare_tracking

REPEAT_TAG = "lakevision.repeat_of"
"""Tag of a repetition: the run that it repeats."""


@dataclass(frozen=True)
class LoggedTraining:
    """What MLflow has of a finished training."""

    run_id: str
    config: dict[str, Any]
    """Content of `config.json`."""
    versions: dict[str, str]
    """Of packages, by name."""
    code_version: str | None
    metrics: dict[str, float]
    batch_sizes: dict[str, str]
    """By stage, where they were left to the training."""
    gone_on: str | None = None
    """What changed on the way, where it was gone on with otherwise than it was begun."""


def logged_training(storage: Storage, run_id: str) -> LoggedTraining:
    """Return what a finished training logged.

    Raises:
        WrongInput: There is no such run, it has not finished, or it was no training.
    """
    way_out = "give a finished run of the flow train, train-distributed or tune"
    try:
        run = client_of(storage).get_run(run_id)
    except MlflowException as error:
        said = without_credentials(str(error))
        raise WrongInput(
            f"run_id is '{run_id}', which '{storage.tracking_shown}' does not have ({said}): {way_out}"
        ) from None
    if run.info.status != RunStatus.to_string(RunStatus.FINISHED):
        raise WrongInput(f"run_id is '{run_id}', a run that is {run.info.status}: {way_out}")
    if "test_accuracy" not in run.data.metrics:
        raise WrongInput(f"run_id is '{run_id}', a run that is no training: {way_out}")
    config: dict[str, Any] = mlflow.artifacts.load_dict(f"runs:/{run_id}/{CONFIG_FILE}")
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
        gone_on=run.data.tags.get(RESUMED_WITH_CHANGES_TAG),
    )


def newest_training(storage: Storage) -> RunRef:
    """Return the newest finished training that is no repetition.

    Raises:
        WrongInput: There is none.
    """
    runs = client_of(storage).search_runs(
        [prepare_tracking(storage)],
        "attributes.status = 'FINISHED' AND metrics.test_accuracy >= 0",
        order_by=["attributes.start_time DESC"],
    )
    for run in runs:
        if REPEAT_TAG not in run.data.tags:
            return RunRef(run_id=run.info.run_id)
    raise WrongInput(
        f"run_id is empty, and the experiment '{EXPERIMENT}' of '{storage.tracking_shown}' has no finished training: "
        "run the flow train first"
    )


def download_weights(storage: Storage, run: RunRef, folder: Path) -> Path:
    """Copy the model that a run logged into `folder`, and return the file with its weights.

    Raises:
        WrongInput: The run has logged no model.
    """
    model_id = whole_model(storage, run)
    if model_id is None:
        raise WrongInput(f"run_id is '{run.run_id}', a run that has logged no model: give another")
    package = Path(mlflow.artifacts.download_artifacts(f"models:/{model_id}", dst_path=str(folder / run.run_id)))
    return next(package.rglob("weights.pt"))
