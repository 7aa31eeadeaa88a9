"""A running `make up`, with authenticated clients."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deployments.stack.login import auth_file, authorization
from tasks.system.listening import free_port
from tests.builders.processes import ROOT, plain_environment


def prefect_client(api: str, auth: str, name: str) -> httpx.Client:
    """Return a client of Prefect's API with a login and the CSRF token of the client `name`."""
    client = httpx.Client(base_url=api, headers=authorization(auth), timeout=120)
    token = client.get("/csrf-token", params={"client": name}).raise_for_status().json()["token"]
    client.headers.update({"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": name})
    return client


@dataclass
class Up:
    """A running `make up`."""

    process: "subprocess.Popen[str]"
    home: Path
    url: str
    mlflow: str
    printed: list[str]
    opened: list[httpx.Client] = field(default_factory=list)

    @property
    def api(self) -> str:
        """Address of Prefect's API."""
        return f"{self.url}/api"

    @property
    def auth(self) -> str:
        """Authentication string, from the owner's file."""
        return auth_file(self.home).read_text().strip()

    def client(self, name: str = "test") -> httpx.Client:
        """Return an authenticated client with a CSRF token."""
        client = prefect_client(self.api, self.auth, name)
        self.opened.append(client)
        return client

    def deployment(self, name: str) -> dict[str, Any]:
        """Return the deployment of a flow."""
        return self.client().get(f"/deployments/name/{name}/{name}").raise_for_status().json()


@contextmanager
def running_up(home: Path) -> Iterator[Up]:
    """Run `make up` on free ports until the block ends; the block starts when all services respond."""
    port, mlflow_port = free_port(), free_port()
    environment = plain_environment(
        LAKEVISION_HOME=str(home),
        LAKEVISION_PORT=str(port),
        LAKEVISION_MLFLOW_PORT=str(mlflow_port),
        LAKEVISION_SERVE_PORT=str(free_port()),
    )
    command = [sys.executable, "-m", "deployments.up"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed: list[str] = []
    try:
        for line in process.stdout:
            printed.append(line)
            if line.startswith("==> MLflow UI "):
                break
        assert process.poll() is None, printed
        started = Up(process, home, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{mlflow_port}", printed)
        yield started
        for client in started.opened:
            client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
        process.stdout.close()
