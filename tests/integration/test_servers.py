"""The servers of docker/compose.yaml on PostgreSQL, Redis and S3: logins, and a run that outlives their restart."""

from collections.abc import Iterator

import httpx
import mlflow
import pytest
from deltalake import DeltaTable

from deployments.stack.login import authorization
from tests.builders.object_store import ObjectStore, serve
from tests.builders.processes import logged_errors
from tests.builders.servers import Servers, running_servers, submit, wait_for_state
from tests.conftest import write_images

BUCKET = "models"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Run an S3 server with an empty bucket."""
    folder = tmp_path_factory.mktemp("store")
    (folder / BUCKET).mkdir()
    with serve(folder) as running:
        yield running


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, store: ObjectStore) -> Iterator[Servers]:
    """Run the servers of compose.yaml and the worker of the pool `cpu`."""
    settings = store.environment() | {"LAKEVISION_ARTIFACTS": f"s3://{BUCKET}/artifacts"}
    with running_servers(tmp_path_factory.mktemp("servers"), settings) as running:
        running.start("worker-cpu")
        yield running


@pytest.mark.parametrize("guess", [None, "lakevision:guessed", "MLFLOW_AUTH"])
def test_prefect_requires_its_own_login(servers: Servers, guess: str | None) -> None:
    """Without a login, with a wrong one and with that of MLflow, no run is read or submitted."""
    headers = {} if guess is None else authorization(servers.secrets.get(guess, guess))
    client = servers.client()
    del client.headers["Authorization"]
    assert client.get("/csrf-token", params={"client": "test"}, headers=headers).status_code == 401
    for path in ("/flow_runs/filter", "/deployments/filter", "/logs/filter"):
        assert client.post(path, headers=headers, json={}).status_code == 401


@pytest.mark.parametrize("guess", [None, "lakevision:guessed", "PREFECT_AUTH"])
def test_mlflow_requires_its_own_login(servers: Servers, guess: str | None) -> None:
    """Without a login, with a wrong one and with that of Prefect, no experiment is read; with its own, it is."""
    search = f"{servers.mlflow}/api/2.0/mlflow/experiments/search?max_results=5"
    headers = {} if guess is None else authorization(servers.secrets.get(guess, guess))
    assert httpx.get(search, headers=headers).status_code == 401
    found = httpx.get(search, headers=authorization(servers.secrets["MLFLOW_AUTH"])).raise_for_status().json()
    assert "lakevision" in {experiment["name"] for experiment in found["experiments"]}


def test_redis_requires_its_password(servers: Servers) -> None:
    """Prefect's events are there, and nobody reads them without the password."""
    assert servers.redis("ping", password=None) == "NOAUTH Authentication required."
    assert servers.redis("keys", "*", password="guessed").endswith("NOAUTH Authentication required.")  # noqa: S106  # no real password
    assert servers.redis("exists", "events", password=servers.secrets["REDIS_PASSWORD"]) == "1"


@pytest.mark.parametrize(("role", "other"), [("mlflow", "prefect"), ("prefect", "mlflow")])
def test_role_of_one_database_cannot_read_the_other(servers: Servers, role: str, other: str) -> None:
    """Each role owns its database, and may connect to no other."""
    own = servers.query(role, role, "SELECT count(*) > 10 FROM pg_tables WHERE tableowner = current_user")
    assert own.stdout == "t\n", own.stderr
    for database in (other, "postgres", "template1"):
        refused = servers.query(role, database, "SELECT 1")
        assert refused.returncode != 0
        assert f'permission denied for database "{database}"' in refused.stderr
    assert servers.query(role, role, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user").stdout == "f\n"


def test_run_completes_although_servers_and_database_restart(
    servers: Servers, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables, its data checks in MLflow and their files on S3 are there, and no secret is visible anywhere."""
    source = servers.folder / "data" / "source"
    write_images(source, per_class=20)
    assert logged_errors(servers.log("prefect")) == []
    run = submit(servers, "etl", {"source": str(source)})
    wait_for_state(servers, run, "RUNNING")

    command_lines = servers.command_lines()
    servers.stop("prefect", "postgres")
    servers.start("postgres")
    servers.start("prefect")

    ended = wait_for_state(servers, run, "COMPLETED")
    assert ended["run_count"] == 1
    table = DeltaTable(servers.folder / "data" / "tables" / "images")
    assert table.to_pyarrow_table(columns=["sha256"]).num_rows == 60

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", servers.secrets["MLFLOW_AUTH"])
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(servers.mlflow)
    experiment = client.get_experiment_by_name("lakevision-data")
    assert experiment.artifact_location == f"s3://{BUCKET}/artifacts"
    (checks,) = client.search_runs([experiment.experiment_id])
    assert checks.info.status == "FINISHED"
    assert checks.data.metrics["images"] == 60
    listed = {file.path for file in client.list_artifacts(checks.info.run_id)}
    assert listed == {path.name for path in store.folder.rglob(f"{checks.info.run_id}/artifacts/*")} != set()

    assert any("deployments.stack.prefect_server" in line for line in command_lines)
    visible = [*servers.secret_values(), store.secret]
    assert [line for line in command_lines if any(secret in line for secret in visible)] == []
    files = [*servers.files(), *(path for path in store.folder.rglob("*") if path.is_file())]
    assert servers.log("worker-cpu") in files
    assert [file for file in files if any(secret.encode() in file.read_bytes() for secret in visible)] == []
