"""The whole DAG on a Spark cluster, with source, tables, cache and models on a store, and all servers behind logins."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import mlflow
import pytest
import s3fs

from tasks.etl.source import NUM_DIGITS, write_digits
from tasks.object_store import file_system
from tasks.spark.file_systems import store_jars
from tests.builders.delta_rows import delta_rows
from tests.builders.object_store import ObjectStore, build_minio, serve_minio
from tests.builders.processes import ROOT, plain_environment
from tests.builders.servers import Servers, running_servers, wait_for_state, wait_for_task
from tests.builders.spark_cluster import SparkCluster, start_cluster

LAKE = "s3a://lake"
EPOCHS = 3
EXECUTOR = "CoarseGrainedExecutorBackend"
START_SECONDS = 120
"""Timeout of the start of the first executor, in seconds."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Run MinIO with the digits in the bucket `lake`, with its credentials in the environment."""
    if not build_minio():
        pytest.skip("MinIO is built with Go, which is not installed")
    subprocess.run([sys.executable, "-m", "deployments.setup.fetch_jars", "s3a"], cwd=ROOT, check=True, timeout=300)
    digits = tmp_path_factory.mktemp("source") / "digits"
    write_digits(digits)
    with pytest.MonkeyPatch.context() as patch, serve_minio(tmp_path_factory.mktemp("minio") / "data") as running:
        for name, value in running.environment().items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        filesystem, _ = file_system(LAKE)
        filesystem.mkdir("lake")
        filesystem.put(str(digits), "lake/digits", recursive=True)
        yield running
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the servers and workers."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, store: ObjectStore, home: Path) -> Iterator[SparkCluster]:
    """Start a cluster whose executors see the store, and no folder or jar of the pools' workers."""
    hidden = [home, store_jars("s3a")]
    with start_cluster(tmp_path_factory.mktemp("cluster"), hidden=hidden, variables=store.environment()) as started:
        yield started


@pytest.fixture(scope="module")
def servers(store: ObjectStore, home: Path, cluster: SparkCluster) -> Iterator[Servers]:
    """Run the servers of compose.yaml, and a worker per pool in its own process and environment."""
    settings = store.environment() | {
        "LAKEVISION_ARTIFACTS": "s3://lake/artifacts",
        "_SPARK_AUTH_SECRET": cluster.secret,
    }
    with running_servers(home, settings) as running:
        running.start("worker-cpu", "worker-gpu")
        yield running


def run_deployment(servers: Servers, config: dict[str, Any]) -> str:
    """Submit a run with Prefect's command line, as deployments/README.md shows, and return its id."""
    environment = plain_environment(
        PREFECT_API_URL=servers.prefect_api, PREFECT_API_AUTH_STRING=servers.secrets["PREFECT_AUTH"]
    )
    command = [
        str(Path(sys.executable).with_name("prefect")),
        "deployment",
        "run",
        "pipeline/pipeline",
        "--params",
        "-",
    ]
    given = json.dumps({"config": config})
    done = subprocess.run(
        command, input=given, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    found = re.search(r"UUID: ([0-9a-f-]{36})", done.stdout)
    assert found, done.stdout
    return found[1]


@pytest.mark.timeout(1500)
def test_dag_runs_on_cluster_store_and_servers_at_once(
    servers: Servers, store: ObjectStore, cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage completes, nothing but the home is local, no lock stays taken, and no secret is visible."""
    config = {
        "source": f"{LAKE}/digits",
        "image_size": 16,
        "model": "resnet18",
        "weights": "none",
        "freeze_backbone": False,
        "max_epochs": EPOCHS,
        "train_on": "both",
        "train": {"batch_size": 64},
        "storage": {"tables": f"{LAKE}/tables", "cache": f"{LAKE}/cache"},
        "spark": cluster.spark_config().model_dump(),
    }
    run = run_deployment(servers, config)
    wait_for_task(servers, "etl", "RUNNING")
    deadline = time.monotonic() + START_SECONDS
    command_lines: list[str] = []
    while not any(EXECUTOR in line for line in command_lines):
        command_lines = servers.command_lines()
        assert time.monotonic() < deadline, servers.log("worker-cpu").read_text()[-4000:]
        time.sleep(0.2)
    wait_for_state(servers, run, "COMPLETED")

    stages = ["preflight", "etl", "cache", "train", "train-distributed", "train-ranks", "promote", "predict", "summary"]
    for stage in stages:
        wait_for_task(servers, stage, "COMPLETED")  # the server records the states of tasks from events, a moment later
    limits = servers.client().post("/v2/concurrency_limits/filter", json={}).raise_for_status().json()
    locks = {limit["name"].split("-")[1]: limit["active_slots"] for limit in limits if "lakevision-" in limit["name"]}
    assert locks.items() >= {"images": 0, "predictions": 0}.items()

    data = servers.folder / "data"
    summary = json.loads((data / "summary.json").read_text())
    assert (summary["images"], summary["predictions"]) == (NUM_DIGITS, NUM_DIGITS)
    assert {path.name for path in data.iterdir()} & {"tables", "cache", "artifacts", "digits"} == set()
    options = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    for name in ("images", "predictions"):
        table = deltalake.DeltaTable(f"s3://lake/tables/{name}", storage_options=options)
        assert delta_rows(table, "sha256").num_rows == NUM_DIGITS
    logs = servers.client().post("/logs/filter", json={"logs": {"flow_run_id": {"any_": [run]}}}).raise_for_status()
    assert [log["message"] for log in logs.json() if "without authentication" in log["message"]] == []

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", servers.secrets["MLFLOW_AUTH"])
    client = mlflow.MlflowClient(servers.mlflow)
    runs = client.search_runs([client.get_experiment_by_name("lakevision").experiment_id])
    assert [trained.info.status for trained in runs] == ["FINISHED"] * 2
    assert [trained.data.metrics["test_accuracy"] > 0.8 for trained in runs] == [True] * 2
    filesystem, _ = file_system(LAKE)
    assert len(filesystem.glob("lake/artifacts/models/*/artifacts/MLmodel")) == 2
    (model,) = client.search_registered_models()
    assert client.get_model_version_by_alias(model.name, "champion").run_id in {trained.info.run_id for trained in runs}

    visible = [*servers.secret_values(), store.secret, cluster.secret]
    assert [line for line in command_lines if any(secret in line for secret in visible)] == []
    written = [file for file in cluster.shared.parent.rglob("*") if file.is_file()]
    objects = [file for file in store.folder.rglob("*") if file.is_file() and ".minio.sys" not in file.parts]
    files = [*servers.files(), *written, *objects]
    assert [file for file in files if any(secret.encode() in file.read_bytes() for secret in visible)] == []
