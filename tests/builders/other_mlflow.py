"""Other work with MLflow in the process or environment that runs this project: its open run, and its settings."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Run


@contextmanager
def open_run(folder: Path, empty_tracking: Path, patch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Open a run of other work, in an experiment, database, registry and active model of its own."""
    folder.mkdir()
    for name in ("runs.db", "models.db"):
        shutil.copy(empty_tracking, folder / name)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_ACTIVE_MODEL_ID"):
        patch.setenv(name, "")  # restored after the test, whatever MLflow sets
    patch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    patch.setattr("mlflow.tracking._model_registry.utils._registry_uri", None)
    patch.setattr("mlflow.tracking.fluent._active_experiment_id", None)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    mlflow.set_registry_uri(f"sqlite:///{folder}/models.db")
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("theirs", (folder / "artifacts").as_uri())
    mlflow.set_experiment(experiment_id=experiment)
    try:
        with mlflow.start_run(run_name="theirs") as run:
            mlflow.set_active_model(model_id=client.create_logged_model(experiment, "theirs").model_id)
            yield run
    finally:
        mlflow.clear_active_model()


def state_of_mlflow() -> dict[str, Any]:
    """Return what MLflow's fluent API would use next, and the environment."""
    run, last = mlflow.active_run(), mlflow.last_active_run()
    return {
        "tracking": mlflow.get_tracking_uri(),
        "registry": mlflow.get_registry_uri(),
        "experiment": mlflow.tracking.fluent._get_experiment_id(),
        "run": None if run is None else run.info.run_id,
        "last run": None if last is None else last.info.run_id,
        "model": mlflow.get_active_model_id(),
        "environment": dict(os.environ),
    }


def logged_by_others(run: Run) -> dict[str, Any]:
    """Return the content of the database and the artifacts of other work, as its own client sees them."""
    client = mlflow.MlflowClient()
    found = client.get_run(run.info.run_id)
    return {
        "runs": [one.info.run_id for one in client.search_runs([found.info.experiment_id])],
        "experiments": sorted(one.name for one in client.search_experiments()),
        "models": [one.model_id for one in client.search_logged_models([found.info.experiment_id])],
        "versions": [one.name for one in client.search_registered_models()],
        "run": found.to_dictionary(),
        "files": [file.path for file in client.list_artifacts(run.info.run_id)],
    }
