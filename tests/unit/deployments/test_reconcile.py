"""The end of MLflow runs whose flow run has ended, in storages that earlier runs were given."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest
from prefect.client.orchestration import SyncPrefectClient

from deployments.stack import reconcile
from tasks.config.storage import StorageConfig
from tasks.storage import Storage, resolve_storage


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> list[Storage]:
    """Return the storages of three runs."""
    found = [resolve_storage(StorageConfig(tracking=f"http://server-{number}")) for number in range(3)]
    monkeypatch.setattr(reconcile, "_storages_of_runs", lambda client, pool: found)
    return found


def end_with(monkeypatch: pytest.MonkeyPatch, end: Callable[[Storage], list[str]]) -> None:
    """End MLflow runs with a function of the storage, as a worker does."""

    def end_lost_runs(storage: Storage, status: Any) -> list[str]:
        return end(storage)

    monkeypatch.setattr("tasks.tracking.runs.end_lost_runs", end_lost_runs)
    reconcile.end_mlflow_runs(create_autospec(SyncPrefectClient))


def test_error_of_any_tracking_server_leaves_the_others(
    storages: list[Storage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker would otherwise never start again, since the run that names the server stays."""
    seen: list[str] = []

    def end(storage: Storage) -> list[str]:
        seen.append(storage.tracking)
        if storage is storages[1]:
            raise ModuleNotFoundError("No module named 'MySQLdb'")
        return [storage.tracking]

    end_with(monkeypatch, end)
    assert seen == [storage.tracking for storage in storages]
    assert capsys.readouterr().out.splitlines() == [
        "the MLflow run http://server-0 is still running, but its flow run has ended: marked as ended",
        "MLflow runs of ended flow runs are not looked for in http://server-1: No module named 'MySQLdb'",
        "the MLflow run http://server-2 is still running, but its flow run has ended: marked as ended",
    ]


def test_tracking_servers_that_do_not_answer_do_not_keep_a_worker(
    storages: list[Storage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them together have a time limit."""
    monkeypatch.setattr(reconcile, "MLFLOW_SECONDS", 0.5)
    answered = threading.Event()

    def end(storage: Storage) -> list[str]:
        if storage is not storages[0]:
            answered.wait(60)
        return []

    end_with(monkeypatch, end)
    answered.set()
    message = "are not looked for in http://server-1 and 1 more: no answer within 0 s"
    assert capsys.readouterr().out.splitlines()[0] == f"MLflow runs of ended flow runs {message}"
