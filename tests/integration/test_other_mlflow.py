"""Other work with MLflow in the same process and environment: this project neither reads nor changes its state."""

from contextlib import suppress
from pathlib import Path

import mlflow
import pytest

from tasks.refs import RunRef
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.runs import read_artifact
from tasks.tracking.searches import parent_run
from tasks.tracking.sender import MetricSender
from tasks.tracking.tracked_run import tracked_run
from tests.builders.other_mlflow import logged_by_others, open_run, state_of_mlflow
from tests.builders.tracked_homes import CARD, log_champion


@pytest.mark.parametrize("variables", [{}, {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}])
def test_open_run_of_a_caller_stays_as_it_is(storage, tmp_path, empty_tracking, monkeypatch, variables):
    """With its own tracking URI, registry, experiment, active model and autologging, also after an error."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with open_run(tmp_path / "theirs", empty_tracking, monkeypatch) as run:
        # Without Spark: disabled, it shuts down the server for callbacks of the session that other tests use.
        mlflow.autolog(silent=True, exclude_flavors=["spark"])
        mlflow.log_metric("loss", 1.0)
        before, logged = state_of_mlflow(), logged_by_others(run)

        model = log_champion(storage, tmp_path / "scratch")
        folder = fetch_registered(storage, model, tmp_path / "fetched")
        assert read_artifact(storage, RunRef(run_id=model.run_id), CARD) == b"# the card"
        with suppress(KeyError), tracked_run(storage, "x", "x", {}, {}, None) as interrupted:
            sender = MetricSender(storage, interrupted.run_id)
            sender.send({"val_loss": 1.0}, 0)
            sender.close()
            raise KeyError
        with suppress(KeyError), parent_run(storage, "tune", "other", {}, {}):
            raise KeyError

        assert state_of_mlflow() == before
        assert logged_by_others(run) == logged
        mlflow.autolog(disable=True, exclude_flavors=["spark"])
        mlflow.log_metric("loss", 2.0)
        assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {"loss": 2.0}
    assert (folder / "model.json").read_text() == "model.json of the model"
    ours = mlflow.MlflowClient(storage.tracking, storage.tracking)
    assert ours.get_run(interrupted.run_id).info.status == "FAILED"
    assert [metric.model_id for metric in ours.get_metric_history(interrupted.run_id, "val_loss")] == [None]
    assert [found.name for found in ours.search_registered_models()] == ["photos"]
    (logged_model,) = ours.search_logged_models([ours.get_run(model.run_id).info.experiment_id])
    assert (logged_model.source_run_id, str(logged_model.status)) == (model.run_id, "READY")
    assert {metric.key for metric in logged_model.metrics} == {"test_accuracy", "best_val_accuracy"}


@pytest.mark.parametrize("run_id", ["that of the champion", "0" * 32])
def test_run_that_the_environment_names_is_not_written_to(storage, tmp_path, monkeypatch, run_id):
    """`mlflow run` sets the variables for the process that it starts."""
    champion = log_champion(storage, tmp_path / "scratch")
    ours = mlflow.MlflowClient(storage.tracking, storage.tracking)
    before = ours.get_run(champion.run_id).to_dictionary()
    monkeypatch.setenv("MLFLOW_RUN_ID", champion.run_id if run_id == "that of the champion" else run_id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", '{"mlflow.note.content": "theirs"}')
    with tracked_run(storage, "new", "another key", {"seed": 2}, {}, None) as run:
        run.log_metrics({"test_accuracy": 0.1}, step=0)
    assert run.run_id != champion.run_id
    assert ours.get_run(champion.run_id).to_dictionary() == before
    assert "mlflow.note.content" not in ours.get_run(run.run_id).data.tags
    assert ours.get_run(run.run_id).data.tags["mlflow.user"]


def test_package_of_a_model_has_no_file_of_the_current_folder(storage, tmp_path, monkeypatch):
    """The lock file and project of the caller are not part of a model."""
    (tmp_path / "project").mkdir()
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / "project" / name).write_text("")
    monkeypatch.chdir(tmp_path / "project")
    log_champion(storage, tmp_path / "scratch")
    (package,) = Path(storage.home).glob("artifacts/models/*/artifacts")
    found = {file.name for file in package.iterdir()}
    assert found == {"MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt", "code", "data"}
