"""The whole DAG on the servers of docker/compose.yaml, whose servers and databases are killed in the middle."""

import signal
import time
from collections.abc import Iterator

import mlflow
import psutil
import pytest
from deltalake import DeltaTable

from tests.builders.delta_rows import delta_rows
from tests.builders.object_store import ObjectStore, serve
from tests.builders.servers import Servers, running_servers, submit, wait_for_state, wait_for_task

BUCKET = "models"
EPOCHS = 3
OUTAGE_SECONDS = 10.0
"""How long PostgreSQL does not answer while both servers run: longer than the first retries of their clients."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Run an S3 server with an empty bucket."""
    folder = tmp_path_factory.mktemp("store")
    (folder / BUCKET).mkdir()
    with serve(folder) as running:
        yield running


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, store: ObjectStore) -> Iterator[Servers]:
    """Run the servers of compose.yaml, and a worker per pool in its own process and environment."""
    settings = store.environment() | {"LAKEVISION_ARTIFACTS": f"s3://{BUCKET}/artifacts"}
    with running_servers(tmp_path_factory.mktemp("servers"), settings) as running:
        running.start("worker-cpu", "worker-gpu")
        yield running


@pytest.mark.timeout(1500)
def test_dag_completes_although_servers_and_databases_are_killed(
    servers: Servers, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL is killed while both servers run, then all servers: runs, metrics, model and files are complete."""
    image_size = {"image_size": 16, "max_epochs": EPOCHS, "train": {"batch_size": 64}}
    run = submit(servers, "pipeline", image_size | {"train_on": "both"})
    for worker in ("worker-cpu", "worker-gpu"):
        # The interpreter may add variables of the locale.
        started = psutil.Process(servers.processes[worker].pid).environ()
        assert servers.environment(worker).items() <= started.items()
        assert started.keys() - servers.environment(worker).keys() <= {"LC_CTYPE"}

    wait_for_task(servers, "train", "RUNNING")
    command_lines = servers.command_lines()
    servers.stop("postgres", number=signal.SIGQUIT)  # as by a crash: it recovers from its log
    time.sleep(OUTAGE_SECONDS)
    servers.start("postgres")

    # The ranks' own stage, on the other worker: a process that starts while no server answers would end as crashed.
    wait_for_task(servers, "train-ranks", "RUNNING")
    command_lines += servers.command_lines()
    servers.stop("prefect", "mlflow", "redis", "postgres", number=signal.SIGKILL)
    servers.start("postgres", "redis")
    servers.start("prefect", "mlflow")
    command_lines += servers.command_lines()

    ended = wait_for_state(servers, run, "COMPLETED")
    assert ended["run_count"] == 1
    stages = ["preflight", "etl", "cache", "train", "train-distributed", "train-ranks", "promote", "predict"]
    for stage in stages:
        wait_for_task(servers, stage, "COMPLETED")  # the server records the states of tasks from events, a moment later
    children = servers.client().post("/flow_runs/filter", json={}).raise_for_status().json()
    assert sorted(child["state_type"] for child in children) == ["COMPLETED"] * 2

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", servers.secrets["MLFLOW_AUTH"])
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(servers.mlflow)
    experiment = client.get_experiment_by_name("lakevision")
    runs = client.search_runs([experiment.experiment_id])
    assert [trained.info.status for trained in runs] == ["FINISHED"] * 2
    for trained in runs:
        history = client.get_metric_history(trained.info.run_id, "val_loss")
        assert sorted({metric.step for metric in history}) == list(range(len(history)))
        assert len(history) == EPOCHS
        assert trained.data.metrics["test_accuracy"] > 0.8
        files = {file.path for file in client.list_artifacts(trained.info.run_id)}
        assert {"config.json", "model_card.md", "test_confusion.png"} <= files
        assert {path.name for path in store.folder.rglob(f"{trained.info.run_id}/artifacts/*")} <= files
    assert len(list(store.folder.rglob("artifacts/models/*/artifacts/MLmodel"))) == 2
    champion = client.get_model_version_by_alias("lakevision-digits", "champion")
    assert champion.run_id in {trained.info.run_id for trained in runs}
    assert [int(version.version) for version in client.search_model_versions("name='lakevision-digits'")] == [1]
    home = servers.folder / "data"
    assert not (home / "artifacts").exists()
    for name in ("images", "predictions"):
        assert delta_rows(DeltaTable(home / "tables" / name), "sha256").num_rows == 1797

    visible = [*servers.secret_values(), store.secret]
    assert [line for line in command_lines if any(secret in line for secret in visible)] == []
    files = [*servers.files(), *(path for path in store.folder.rglob("*") if path.is_file())]
    assert [file for file in files if any(secret.encode() in file.read_bytes() for secret in visible)] == []
