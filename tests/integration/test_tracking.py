"""MLflow on a real database: what it refuses, and what a run holds."""

import json
import time

import mlflow
import pytest
from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL

from tasks import tracking
from tasks.config import StorageConfig
from tasks.errors import WrongInput
from tasks.refs import RunRef
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


def test_a_table_that_is_logged_again_replaces_the_first(tmp_path):
    """A training that was resumed after it had logged its tables has each row once; MLflow's own function appends."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        for recall in (0.25, 0.5):
            run.log_table({"class": ["ant", "bee"], "recall": [1.0, recall]}, "classes.json")
    content = tracking.read_artifact(storage, RunRef(run_id=run.run_id), "classes.json")
    assert content is not None
    assert json.loads(content) == {"columns": ["class", "recall"], "data": [["ant", 1.0], ["bee", 0.5]]}
    tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "classes.json", "type": "table"}]


def test_an_artifact_that_is_not_there_is_none(tmp_path):
    """Runs of an older version have fewer."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        run.log_text("# a card", "model_card.md")
    assert tracking.read_artifact(storage, RunRef(run_id=run.run_id), "model_card.md") == b"# a card"
    assert tracking.read_artifact(storage, RunRef(run_id=run.run_id), "other.md") is None


def test_a_run_has_system_metrics_every_two_seconds_or_as_often_as_somebody_chose(tmp_path, monkeypatch):
    """MLflow's own ten are more than a short training takes, which would have none."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    monkeypatch.setenv(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.name, "0.5")
    with tracking.tracked_run(storage, "chosen", "one", {}, {}, None) as run:
        assert MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() == 0.5
    monkeypatch.delenv(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.name)
    wanted = {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"}
    with tracking.tracked_run(storage, "default", "two", {}, {}, None) as run:
        assert MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() == 2.0
        deadline = time.monotonic() + 60
        while not wanted <= tracking.run_metrics(storage, RunRef(run_id=run.run_id)).keys():
            assert time.monotonic() < deadline, "no sample came"
            time.sleep(0.2)


def test_a_resumed_run_keeps_the_code_version_it_began_with(tmp_path, monkeypatch):
    """What made the checkpoint is what made the model."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    with tracking.tracked_run(storage, "test", "key", {}, {}, None) as run:
        assert run.code_version == "first"
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    with tracking.tracked_run(storage, "test", "key", {}, {}, run.run_id) as resumed:
        assert resumed.code_version == "first"
