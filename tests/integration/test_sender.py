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

import pytest

from tasks import tracking
from tasks.config import StorageConfig
from tasks.storage import Storage, resolve_storage
from tasks.tracking import MetricSender, TrackingAway
from tests.processes import free_port, plain_environment

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
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id, retry_seconds=0.2)
        sender.send({"val_loss": 3.0}, 0)
        while sender.steps_sent("val_loss") != {0}:
            time.sleep(0.05)
        end()
        for step in (1, 2, 3):
            sender.send({"val_loss": 3.0 - step, "val_accuracy": 0.1 * step}, step)
        start()
        sender.close(timeout_seconds=60)
        history = sender._client.get_metric_history(run.run_id, "val_loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)]


def test_a_server_that_stays_away_is_told_at_the_end(tmp_path, server, monkeypatch):
    """In one sentence with the way out, and not as a wrong input: run again, it goes on."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url, start, end = server
    storage = storage_of(tmp_path / "home", url)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id, retry_seconds=0.2)
        end()
        sender.send({"val_loss": 1.0}, 0)
        with pytest.raises(TrackingAway, match=r"has not answered for 1 s: the training is in its checkpoint; mend"):
            sender.close(timeout_seconds=1)
        start()


def test_metrics_of_one_database_are_there_at_the_end(tmp_path):
    """Without a server, too."""
    storage = storage_of(tmp_path)
    with tracking.tracked_run(storage, "run", "key", {}, {}, None) as run:
        sender = MetricSender(storage, run.run_id)
        for step in range(3):
            sender.send({"val_loss": float(step)}, step)
        sender.close()
        assert sender.steps_sent("val_loss") == {0, 1, 2}
