"""Tests of the containers in docker/compose.yaml: environments, networks, privileges and limits."""

import re

import pytest
import yaml

from tests.builders.processes import ROOT

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SECRET = re.compile(r"\$\{\w*(?:PASSWORD|AUTH|SECRET)")
WORKERS = [name for name, service in SERVICES.items() if "worker" in name and "environment" in service]


@pytest.mark.parametrize("name", WORKERS)
def test_links_in_runs_have_addresses_that_a_browser_on_the_host_can_open(name: str) -> None:
    """The addresses are the published ports, not the names by which containers reach each other."""
    environment = SERVICES[name]["environment"]
    published = {server: SERVICES[server]["ports"][0].rpartition(":")[0] for server in ("prefect", "mlflow")}

    assert environment["PREFECT_UI_URL"] == f"http://{published['prefect']}"
    assert environment["LAKEVISION_MLFLOW_UI"] == f"http://{published['mlflow']}"


@pytest.mark.parametrize("name", SERVICES)
def test_container_has_no_privileges_and_limits(name: str) -> None:
    """No container has a capability, gains privileges, or takes all memory or process ids of the machine."""
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\$\{\w+:-\d+g\}|\d+g", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 16384
    assert "privileged" not in service


@pytest.mark.parametrize("name", WORKERS)
def test_worker_has_the_same_host_name_in_a_new_container(name: str) -> None:
    """By its host name, a worker knows the runs that its predecessor left."""
    assert SERVICES[name]["hostname"] == name


def test_databases_are_reachable_from_the_two_servers_only() -> None:
    """Their network has no way out, publishes no port, and has no worker."""
    assert COMPOSE["networks"]["backend"] == {"internal": True}
    backend = {name for name, service in SERVICES.items() if "backend" in service["networks"]}
    assert backend == {"postgres", "redis", "prefect", "mlflow"}
    for name in ("postgres", "redis"):
        assert SERVICES[name]["networks"] == ["backend"]
        assert "ports" not in SERVICES[name]
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000", "127.0.0.1:8000:8000"]


def test_record_of_the_deployments_outlives_its_container() -> None:
    """The service that registers them tells a user's edits by it; without a volume, each start would lose them."""
    assert SERVICES["deploy"]["volumes"] == ["lakevision:/var/lib/lakevision"]


def test_mlflow_cannot_write_to_the_data() -> None:
    """An experiment's artifact location is chosen by its creator, and the server reads files there."""
    assert SERVICES["mlflow"]["volumes"] == ["lakevision:/var/lib/lakevision:ro"]


def test_no_secret_is_on_a_command_line_or_shared_by_two_servers() -> None:
    """Each server has the password of its own database only, and workers have none."""
    for name, service in SERVICES.items():
        shown = [*service.get("command", []), *service.get("healthcheck", {}).get("test", [])]
        assert not any(SECRET.search(word) for word in shown), name
    used = {
        name: set(re.findall(r"\$\{(\w+):\?", str(service.get("environment")))) for name, service in SERVICES.items()
    }
    assert used == {
        "postgres": {"POSTGRES_PASSWORD", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD"},
        "redis": {"REDIS_PASSWORD"},
        "prefect": {"PREFECT_AUTH", "PREFECT_DB_PASSWORD", "REDIS_PASSWORD"},
        "mlflow": {"MLFLOW_AUTH", "MLFLOW_DB_PASSWORD"},
        "deploy": {"PREFECT_AUTH"},
        "serve": {"LAKEVISION_API_KEY", "MLFLOW_AUTH"},
        "worker-cpu": {"PREFECT_AUTH", "MLFLOW_AUTH"},
        "worker-gpu": {"PREFECT_AUTH", "MLFLOW_AUTH"},
    }
