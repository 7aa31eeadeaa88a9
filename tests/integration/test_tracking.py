"""MLflow on a real database: what it refuses, and what a run holds."""

import json
import time
import traceback
from contextlib import suppress

import mlflow
import pytest
from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from pydantic import ValidationError

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


def test_a_run_that_was_begun_and_has_measured_nothing_is_gone_on_with(tmp_path, monkeypatch):
    """Wherever its process was killed; one that measured, finished, or ran other code is another's."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    config = {"train": {"seed": 1, "max_epochs": 2}}
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    assert tracking.find_begun_run(storage, "key") is None
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    # Killed as soon as the run was made.
    experiment = tracking.prepare_tracking(storage)
    begun = client.create_run(experiment, tags={"lakevision.key": "key"}).info.run_id
    assert tracking.find_begun_run(storage, "key") == begun
    assert tracking.find_begun_run(storage, "other") is None
    # Ended before the first epoch, with system metrics alone.
    with suppress(KeyboardInterrupt), tracking.tracked_run(storage, "test", "key", config, {}, begun) as run:
        run.log_metrics({"system/cpu_utilization_percentage": 1.0}, step=0)
        raise KeyboardInterrupt
    found = client.get_run(begun)
    assert found.info.status == "KILLED"
    assert found.data.params["train.max_epochs"] == "2"
    assert found.data.params.keys() >= {"version.torch", "version.mlflow"}
    assert found.data.tags["lakevision.code_version"] == "first"
    assert json.loads(tracking.read_artifact(storage, RunRef(run_id=begun), "config.json") or b"") == config
    assert tracking.find_begun_run(storage, "key") == begun
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    assert tracking.find_begun_run(storage, "key") is None
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "first")
    with tracking.tracked_run(storage, "test", "key", config, {}, begun) as run:
        run.log_metrics({"val_loss": 1.0}, step=0)
        assert tracking.find_begun_run(storage, "key") is None
    assert client.get_run(begun).info.status == "FINISHED"
    with tracking.tracked_run(storage, "test", "finished", config, {}, None):
        pass
    assert tracking.find_begun_run(storage, "finished") is None


def test_a_password_in_the_tracking_uri_is_shown_to_nobody(tmp_path, monkeypatch):
    """Not in what is said of it, not in settings, which a submitted run's form shows: only in the environment."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("LAKEVISION_TRACKING_URI", "http://bob:hunter2@127.0.0.1:9")
    storage = resolve_storage(StorageConfig(home=str(tmp_path)))
    assert "hunter2" in storage.tracking
    with pytest.raises(WrongInput, match=r"'http://\*\*\*@127.0.0.1:9', which does not answer") as refused:
        tracking.check_tracking(storage)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
    assert "hunter2" not in storage.as_config().model_dump_json()
    assert resolve_storage(storage.as_config()) == storage
    with pytest.raises(ValidationError, match="a user name or password"):
        StorageConfig(tracking="postgresql://bob:hunter2@127.0.0.1/mlflow")
