"""The model registry: versions, aliases, and the model package in a folder."""

import json
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException

from tasks.errors import WrongInput
from tasks.refs import ModelRef, RunRef
from tasks.storage import Storage
from tasks.tracking.description import DESCRIPTION_TAG, MAX_VERSION_DESCRIPTION, fit_description
from tasks.tracking.kept import table_tags
from tasks.tracking.server import client_of


def whole_model(storage: Storage, run: RunRef) -> str | None:
    """Return the id of the newest whole model that a run logged, or None.

    A training that was killed while it logged its model logs another one when it goes on: the first is not whole.
    """
    client = client_of(storage)
    logged = [client.get_logged_model(output.model_id) for output in client.get_run(run.run_id).outputs.model_outputs]
    whole = [model for model in logged if model.status == LoggedModelStatus.READY]
    return str(max(whole, key=lambda model: model.creation_timestamp).model_id) if whole else None


def register_run(storage: Storage, run: RunRef, name: str) -> ModelRef:
    """Register the run's model under `name`; a run that is registered already keeps its version."""
    client = client_of(storage)
    for found in client.search_model_versions(f"name = '{name}'"):
        if found.run_id == run.run_id:
            return ModelRef(name=name, version=int(found.version), run_id=run.run_id)
    model_id = whole_model(storage, run)
    if model_id is None:
        raise WrongInput(f"MLflow run '{run.run_id}' has logged no model: give finished runs of the flow train")
    logged = client.get_run(run.run_id).data
    # Kept beside the model as well: maintenance needs them when the run is purged.
    created = mlflow.register_model(f"models:/{model_id}", name, tags=table_tags(logged.params))
    if description := logged.tags.get(DESCRIPTION_TAG):
        # The model card, where a reader of the registry looks for it.
        client.update_model_version(name, created.version, fit_description(description, MAX_VERSION_DESCRIPTION))
    return ModelRef(name=name, version=int(created.version), run_id=run.run_id)


def model_with_alias(storage: Storage, name: str, alias: str) -> ModelRef | None:
    """Return the model version that the alias names, or None."""
    try:
        found = client_of(storage).get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    return ModelRef(name=name, version=int(found.version), run_id=found.run_id)


def set_alias(storage: Storage, model: ModelRef, alias: str, tags: dict[str, str]) -> None:
    """Let the alias name this version, and say in the version's tags what it was measured and whom it replaced."""
    client = client_of(storage)
    for name, value in tags.items():
        client.set_model_version_tag(model.name, str(model.version), name, value)
    client.set_registered_model_alias(model.name, alias, str(model.version))


def download_model(storage: Storage, model: ModelRef, folder: Path) -> Path:
    """Copy the model package of a registered version into `folder`."""
    client_of(storage)
    return Path(mlflow.artifacts.download_artifacts(f"models:/{model.name}/{model.version}", dst_path=str(folder)))


def load_package(folder: Path) -> Any:
    """Load a model package from a folder; it has `predict`, from a frame with `content` to a frame."""
    return mlflow.pyfunc.load_model(str(folder))


def to_json(value: Any) -> str:
    """Serialize for a tag: sorted, compact."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
