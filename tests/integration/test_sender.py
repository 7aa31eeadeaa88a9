"""Metrics and a tracking server that goes away: a real one, ended and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import mlflow
import pytest
import torch
import torchvision
from mlflow.exceptions import MlflowException

from tasks import tracking
from tasks.config.storage import StorageConfig
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.errors import Diverged, RunDeleted, TrackingAway
from tasks.storage import Storage, resolve_storage
from tasks.tracking import MetricSender
from tasks.tracking.runs import has_run
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.processes import free_port, plain_environment

START_SECONDS = 90.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Give the URL of a tracking server, and what starts and ends it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
        with (tmp_path / "server.log").open("ab") as log:
            running.append(
                subprocess.Popen(
                    [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
                    stdout=log,
                    stderr=log,
                    env=plain_environment(),
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                return
            time.sleep(0.2)
        pytest.fail((tmp_path / "server.log").read_text())

    def end() -> None:
        while running:
            process = running.pop()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    start()
    yield url, start, end
    end()


def storage_of(home: Path, tracking_uri: str | None = None) -> Storage:
    """Return the storage below a folder."""
    return resolve_storage(StorageConfig(home=str(home), tracking=tracking_uri))


def test_a_server_that_is_away_gets_every_metric_once_when_it_is_back(tmp_path, server, monkeypatch):
    """In their order; what is sent does not wait, the end does."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id, retry_seconds=0.2)
        sender.send({"val_loss": 3.0}, 0)
        while sender.steps_sent("val_loss") != {0}:
            time.sleep(0.05)
        machine = mlflow.tracking.fluent.run_id_to_system_metrics_monitor
        end()
        # MLflow's own thread for the machine's metrics gives up.
        while machine[run.run_id]._process.is_alive():
            time.sleep(0.05)
        for step in (1, 2, 3):
            sender.send({"val_loss": 3.0 - step, "val_accuracy": 0.1 * step}, step)
        start()
        sender.close(timeout_seconds=60)
        assert machine[run.run_id]._process.is_alive()
        history = sender._client.get_metric_history(run.run_id, "val_loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)]


def test_a_server_that_stays_away_is_told_at_the_end(tmp_path, monkeypatch):
    """In one sentence with the way out, and not as a wrong input: run again, it goes on."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sender = MetricSender(storage_of(tmp_path, f"http://127.0.0.1:{free_port()}"), "run", retry_seconds=0.2)
    sender.send({"val_loss": 1.0}, 0)
    with pytest.raises(TrackingAway, match=r"has not answered for 1 s: the training is in its checkpoint; mend"):
        sender.close(timeout_seconds=1)


def test_a_training_goes_on_while_the_server_is_away_and_loses_no_metric(tmp_path, make_images, server, monkeypatch):
    """Away after its first epoch and back after its third, another stage between: each epoch is there once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    cache = hand_made_cache(make_images(), f"{storage.cache}/by-hand")
    weights = tmp_path / "weights.pt"
    torch.save(torchvision.models.get_model("squeezenet1_1", weights=None).state_dict(), weights)
    trained = []

    def go_away_and_come_back(metrics):
        trained.append(metrics.epoch)
        if metrics.epoch == 0:
            end()
        if metrics.epoch == 2:
            start()

    run = train_model(
        TrainingSpec(
            train=TrainConfig(
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
        on_epoch=go_away_and_come_back,
    )
    assert trained == [0, 1, 2, 3]
    client = mlflow.MlflowClient(tracking_uri=url)
    for name in ("val_loss", "train_loss", "gradient_norm"):
        assert [metric.step for metric in client.get_metric_history(run.run_id, name)] == trained
    finished = client.get_run(run.run_id)
    assert finished.info.status == "FINISHED"
    assert {f"{tracking.BATCH_SIZE_TAG}{stage}" for stage in (0, 1)} <= finished.data.tags.keys()
    assert tracking.read_artifact(storage, run, "model_card.md") is not None


@pytest.mark.parametrize("raised", [Diverged("the loss is nan"), KeyboardInterrupt(15)])
def test_what_ends_a_training_is_not_hidden_by_a_server_that_is_away(tmp_path, server, monkeypatch, messages_of, raised):
    """It cannot be told of the end; the next run has no part of that."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    begun = []

    def train():
        with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
            begun.append(run.run_id)
            end()
            raise raised

    with pytest.raises(type(raised)) as caught:
        train()
    assert caught.value is raised
    [run_id] = begun
    assert messages_of("lakevision.tracking")[-1].startswith(f"MLflow run {run_id} is left as running: the tracking server ")
    start()
    with tracking.tracked_run(storage, "run", "key", {}, {}, run_id):
        pass
    assert mlflow.MlflowClient(tracking_uri=url).get_run(run_id).info.status == "FINISHED"


def test_metrics_of_one_database_are_there_at_the_end(tmp_path):
    """Without a server, too."""
    storage = storage_of(tmp_path)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)
        for step in range(3):
            sender.send({"val_loss": float(step)}, step)
        sender.close()
        assert sender.steps_sent("val_loss") == {0, 1, 2}


def test_a_run_that_was_deleted_is_told_as_such_and_not_waited_for(tmp_path):
    """No server will ever take its metrics."""
    storage = storage_of(tmp_path)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)
        sender._client.delete_run(run.run_id)
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(RunDeleted, match=r"was deleted while it was trained: the training is in its checkpoint"):
            sender.close(timeout_seconds=60)
        sender._client.restore_run(run.run_id)


def test_a_server_that_goes_while_it_is_asked_for_the_run_is_away(tmp_path, monkeypatch):
    """The thread lives on: what the server says when it is back counts."""
    storage = storage_of(tmp_path)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id, retry_seconds=0.2)
        sender._client.delete_run(run.run_id)
        asked = []

        def gone_at_first(storage, run_id):
            asked.append(run_id)
            if len(asked) == 1:
                raise MlflowException("connection refused")
            return has_run(storage, run_id)

        monkeypatch.setattr("tasks.tracking.sender.has_run", gone_at_first)
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(RunDeleted):
            sender.close(timeout_seconds=60)
        assert len(asked) == 2
        sender._client.restore_run(run.run_id)


def test_what_ends_the_senders_thread_is_raised_at_the_end(tmp_path, monkeypatch):
    """No training is finished whose metrics were not sent."""
    storage = storage_of(tmp_path)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)

        def fail(*_given, **_named):
            raise ValueError("no such thing")

        monkeypatch.setattr(sender._client, "log_batch", fail)
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(ValueError, match="no such thing"):
            sender.close(timeout_seconds=60)
