"""Test of the environment of the containers in docker/compose.yaml."""

import pytest
import yaml

from tests.builders.processes import ROOT

SERVICES = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
WORKERS = [name for name, service in SERVICES.items() if "worker" in name and "environment" in service]


@pytest.mark.parametrize("name", WORKERS)
def test_links_in_runs_have_addresses_that_a_browser_on_the_host_can_open(name: str) -> None:
    """The addresses are the published ports, not the names by which containers reach each other."""
    environment = SERVICES[name]["environment"]
    published = {server: SERVICES[server]["ports"][0].rpartition(":")[0] for server in ("prefect", "mlflow")}

    assert environment["PREFECT_UI_URL"] == f"http://{published['prefect']}"
    assert environment["LAKEVISION_MLFLOW_UI"] == f"http://{published['mlflow']}"
