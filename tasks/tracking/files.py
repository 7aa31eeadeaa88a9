"""Files of MLflow runs and models.

MLflow's client caches where the files of a run or model are by its id alone, but a copied home has the same ids.
"""

import json
import posixpath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from tasks.storage import Storage
from tasks.tracking.server import client_of


def repository(storage: Storage, location: str) -> ArtifactRepository:
    """Return MLflow's access to the files at a location."""
    return get_artifact_repository(location, tracking_uri=storage.tracking, registry_uri=storage.tracking)


def run_files(storage: Storage, run_id: str) -> ArtifactRepository:
    """Return MLflow's access to the artifacts of a run."""
    return repository(storage, client_of(storage).get_run(run_id).info.artifact_uri)


def read_file(storage: Storage, run_id: str, name: str) -> bytes:
    """Return the content of a file in the artifacts of a run.

    Raises:
        MlflowException: There is no such file.
    """
    with TemporaryDirectory() as scratch:
        return Path(run_files(storage, run_id).download_artifacts(name, scratch)).read_bytes()


def read_json(storage: Storage, run_id: str, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in the artifacts of a run; raises as `read_file`."""
    content: dict[str, Any] = json.loads(read_file(storage, run_id, name))
    return content


def log_text(storage: Storage, run_id: str, text: str, name: str) -> None:
    """Write a text file into the artifacts of a run; an existing one is replaced."""
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / posixpath.basename(name)
        file.write_text(text, encoding="utf-8")
        run_files(storage, run_id).log_artifact(str(file), posixpath.dirname(name) or None)


def log_json(storage: Storage, run_id: str, value: dict[str, Any], name: str) -> None:
    """Write a JSON file into the artifacts of a run; an existing one is replaced."""
    log_text(storage, run_id, json.dumps(value, indent=2, default=str, ensure_ascii=False), name)


def log_table(storage: Storage, run_id: str, columns: dict[str, list[Any]], name: str) -> None:
    """Write a table, given as columns by name, as JSON that MLflow's UI shows; an existing one is replaced.

    MLflow's own function would append to it, so that a resumed run would have each row twice.
    """
    text = pd.DataFrame(columns).to_json(orient="split", index=False, date_format="iso")
    log_text(storage, run_id, text, name)
    client = client_of(storage)
    shown = json.loads(client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
    table = {"path": name, "type": "table"}
    if table not in shown:
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*shown, table]))
