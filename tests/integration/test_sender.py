"""Metrics and a real tracking server that is stopped and restarted."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
import torch
import torchvision
from mlflow.exceptions import MlflowException

from tasks.config.storage import StorageConfig
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.errors import Diverged, RunDeleted, TrackingUnavailable, WrongInput
from tasks.refs import RunRef
from tasks.storage import Storage, resolve_storage
from tasks.system.listening import free_port
from tasks.tracking import experiments
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.runs import BATCH_SIZE_TAG, find_data_checks, has_run, read_artifact
from tasks.tracking.sender import MetricSender
from tasks.tracking.server import check_tracking
from tasks.tracking.tracked_run import monitors, tracked_run
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.tracked_homes import CARD, log_champion
from tests.builders.tracking_server import TrackingServer


@pytest.fixture(scope="module")
def tracking_server(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Iterator[TrackingServer]:
    """Yield a tracking server of all tests."""
    folder = tmp_path_factory.mktemp("server")
    database = shutil.copy(empty_tracking, folder)
    with TrackingServer(f"sqlite:///{database}", folder / "server.log") as started:
        yield started


@pytest.fixture
def server(tracking_server: TrackingServer) -> tuple[str, Callable[[], None], Callable[[], None]]:
    """Return the URL of a running tracking server, and the functions that start and stop it."""
    if not tracking_server.is_running:
        tracking_server.start()
    return tracking_server.url, tracking_server.start, tracking_server.kill


def storage_of(home: Path, tracking_uri: str | None = None) -> Storage:
    """Return the storage of a run below `home`."""
    return resolve_storage(StorageConfig(home=str(home), tracking=tracking_uri))


def test_server_gets_every_metric_once_after_an_outage(tmp_path, server, monkeypatch):
    """Metrics arrive in order; `send` does not wait for the server, and `close` does."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    with tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id, retry_seconds=0.2)
        sender.send({"val_loss": 3.0}, 0)
        while sender.steps_sent("val_loss") != {0}:
            time.sleep(0.05)
        end()
        # MLflow's own thread for system metrics stops on its first error.
        while monitors[run.run_id]._process.is_alive():
            time.sleep(0.05)
        for step in (1, 2, 3):
            sender.send({"val_loss": 3.0 - step, "val_accuracy": 0.1 * step}, step)
        start()
        sender.close(timeout_seconds=60)
        assert monitors[run.run_id]._process.is_alive()
        history = sender._client.get_metric_history(run.run_id, "val_loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)]


def test_close_raises_while_the_server_does_not_answer(tmp_path, monkeypatch):
    """The error names a way out, and is not a user error: run again, the training run resumes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sender = MetricSender(storage_of(tmp_path, f"http://127.0.0.1:{free_port()}"), "run", retry_seconds=0.2)
    sender.send({"val_loss": 1.0}, 0)
    with pytest.raises(TrackingUnavailable, match="has not answered for 1 s: .* its checkpoint"):
        sender.close(timeout_seconds=1)


def test_training_continues_during_an_outage_and_loses_no_metric(tmp_path, make_images, server, monkeypatch):
    """A server that is down from the first to the third epoch, across two phases, has each epoch once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    cache = hand_made_cache(make_images(), f"{storage.cache}/by-hand")
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model("squeezenet1_1", weights=None).state_dict(), weights)
    trained = []

    def stop_and_restart(metrics):
        trained.append(metrics.epoch)
        if metrics.epoch == 0:
            end()
        if metrics.epoch == 2:
            start()

    run = train_model(
        TrainingSpec(
            train=TrainConfig(
                recipe="given",
                model="squeezenet1_1",
                weights=str(weights),
                batch_size="auto",
                max_epochs=2,
                patience=4,
                fine_tune=[FineTunePhase(unfreeze_from="features.12", max_epochs=2)],
            ),
            cache=cache,
            storage=storage,
        ),
        on_epoch=stop_and_restart,
    )
    assert trained == [0, 1, 2, 3]
    client = mlflow.MlflowClient(tracking_uri=url)
    for name in ("val_loss", "train_loss", "gradient_norm"):
        assert [metric.step for metric in client.get_metric_history(run.run_id, name)] == trained
    finished = client.get_run(run.run_id)
    assert finished.info.status == "FINISHED"
    assert {f"{BATCH_SIZE_TAG}{stage}" for stage in (0, 1)} <= finished.data.tags.keys()
    assert read_artifact(storage, run, "model_card.md") is not None


def test_error_of_a_run_is_not_hidden_by_an_outage(tmp_path, server, monkeypatch, messages_of):
    """The MLflow run is left as running, and the resumed run finishes it."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    errors = {"diverged": Diverged("the loss is nan"), "interrupted": KeyboardInterrupt(15)}
    begun, caught = {}, {}

    @contextmanager
    def run(key):
        try:
            with tracked_run(storage, "run", key, {}, {}, None) as tracked:
                begun[key] = tracked.run_id
                yield
                raise errors[key]
        except type(errors[key]) as error:
            caught[key] = error
        assert messages_of("lakevision.tracking")[-1].startswith(
            f"MLflow run {begun[key]} is left as running: the tracking server "
        )

    with run("diverged"), run("interrupted"):  # Both begin before one outage, since each start takes seconds.
        end()
    assert all(caught[key] is error for key, error in errors.items())
    start()
    # The connections that are kept are those of the server that was killed: the first request on one fails.
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    for key, run_id in begun.items():
        with tracked_run(storage, "run", key, {}, {}, run_id):
            pass
        assert mlflow.MlflowClient(tracking_uri=url).get_run(run_id).info.status == "FINISHED"


def test_database_without_a_server_has_all_metrics_after_close(storage):
    """A database without a server has all metrics after `close`."""
    with tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)
        for step in range(3):
            sender.send({"val_loss": float(step)}, step)
        sender.close()
        assert sender.steps_sent("val_loss") == {0, 1, 2}


def test_close_raises_at_once_for_a_deleted_run(storage):
    """A deleted run has its own error, since no server will ever accept its metrics."""
    with tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)
        sender._client.delete_run(run.run_id)
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(RunDeleted, match="was deleted during training: .* its checkpoint"):
            sender.close(timeout_seconds=60)
        sender._client.restore_run(run.run_id)


def test_outage_during_the_check_for_a_deleted_run_is_retried(storage, monkeypatch):
    """The sender thread survives the outage, and asks again once the server answers."""
    with tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id, retry_seconds=0.2)
        sender._client.delete_run(run.run_id)
        calls = []

        def fail_once(storage, run_id):
            calls.append(run_id)
            if len(calls) == 1:
                raise MlflowException("connection refused")
            return has_run(storage, run_id)

        monkeypatch.setattr("tasks.tracking.sender.has_run", fail_once)
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(RunDeleted):
            sender.close(timeout_seconds=60)
        assert len(calls) == 2
        sender._client.restore_run(run.run_id)


def test_error_of_the_sender_thread_is_raised_by_close(storage, monkeypatch):
    """A run whose metrics were not sent does not finish."""
    with tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)

        def fail(*_given, **_named):
            raise ValueError("no such thing")

        monkeypatch.setattr("tasks.tracking.sender.log_metrics", fail)
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(ValueError, match="no such thing"):
            sender.close(timeout_seconds=60)


def test_files_of_two_machines_are_where_their_server_keeps_them(tmp_path, server):
    """Each has a home of its own, in which the other one would not see them."""
    url, _start, _end = server
    one, other = storage_of(tmp_path / "one", url), storage_of(tmp_path / "other", url)
    model = log_champion(one, tmp_path / "scratch")

    check_tracking(other)
    folder = fetch_registered(other, model, tmp_path / "fetched")
    assert (folder / "model.json").read_text() == "model.json of the model"
    assert read_artifact(other, RunRef(run_id=model.run_id), CARD) == b"# the card"
    assert find_data_checks(other, "checks") == {"leaked": 0}
    assert log_champion(other, tmp_path / "scratch").version == model.version + 1
    assert not list(tmp_path.glob("o*/artifacts"))
    client = mlflow.MlflowClient(tracking_uri=url)
    for name in ("lakevision", "lakevision-data"):
        assert client.get_experiment_by_name(name).artifact_location.startswith("mlflow-artifacts:/")


def test_folder_of_another_machine_is_not_made_on_this_one(tmp_path, server, monkeypatch):
    """The experiment of an older release, or of a server that serves no artifacts, has a folder as its location."""
    url, _start, _end = server
    monkeypatch.setattr(experiments, "TRAINING", replace(experiments.TRAINING, name="elsewhere"))
    monkeypatch.setattr("tasks.tracking.server.TRAINING", experiments.TRAINING)
    theirs = tmp_path / "their home" / "artifacts"
    mlflow.MlflowClient(tracking_uri=url).create_experiment("elsewhere", theirs.as_uri())
    storage = storage_of(tmp_path / "home", url)
    text = f"the experiment 'elsewhere' of '{url}' keeps its artifacts in '{theirs}', .* whose home is '{storage.home}'"
    with pytest.raises(WrongInput, match=text):
        check_tracking(storage)
    with pytest.raises(WrongInput, match=text):
        log_champion(storage, tmp_path / "scratch")
    assert not theirs.parent.exists()
    theirs.mkdir(parents=True)  # a folder that both machines share
    check_tracking(storage)
