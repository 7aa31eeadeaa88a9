"""MLflow on a real database: what it refuses."""

import pytest

from tasks import tracking
from tasks.config import StorageConfig
from tasks.errors import WrongInput
from tasks.storage import resolve_storage


def test_artifacts_cannot_move_under_an_experiment_that_is_there(tmp_path):
    """MLflow would go on writing to the old place without a word; an empty setting means that place."""
    home = str(tmp_path / "home")
    tracking.check_tracking(resolve_storage(StorageConfig(home=home, artifacts=str(tmp_path / "first"))))
    tracking.check_tracking(resolve_storage(StorageConfig(home=home)))
    with pytest.raises(WrongInput, match=r"storage.artifacts is '.*/second', but the experiment 'lakevision' of"):
        tracking.check_tracking(resolve_storage(StorageConfig(home=home, artifacts=str(tmp_path / "second"))))


def test_a_tracking_server_that_does_not_answer_is_named(tmp_path, monkeypatch):
    """Before any work, with the way out."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    storage = resolve_storage(StorageConfig(home=str(tmp_path), tracking="http://127.0.0.1:9"))
    with pytest.raises(WrongInput, match="storage.tracking is 'http://127.0.0.1:9', which does not answer"):
        tracking.check_tracking(storage)
