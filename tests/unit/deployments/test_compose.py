"""What the containers of docker/compose.yaml are told."""

import pytest
import yaml

from tests.builders.processes import ROOT

SERVICES = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
WORKERS = [name for name, service in SERVICES.items() if "worker" in name and "environment" in service]


@pytest.mark.parametrize("name", WORKERS)
def test_links_of_a_run_lead_to_pages_that_a_browser_on_the_host_can_open(name: str) -> None:
    """Not to the names that containers have for each other, which workers call the servers by."""
    environment = SERVICES[name]["environment"]
    published = {server: SERVICES[server]["ports"][0].rpartition(":")[0] for server in ("prefect", "mlflow")}

    assert environment["PREFECT_UI_URL"] == f"http://{published['prefect']}"
    assert environment["LAKEVISION_MLFLOW_UI"] == f"http://{published['mlflow']}"
