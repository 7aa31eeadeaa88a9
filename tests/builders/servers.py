"""The servers and workers of docker/compose.yaml as processes, each with its own environment and nothing else."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.stack.login import authorization
from tests.builders.compose import SERVER_PATH, Compose, generated_secrets
from tests.builders.processes import ROOT
from tests.builders.stack import prefect_client

PROGRAMS = ("initdb", "postgres", "psql", "pg_isready", "redis-server", "redis-cli")
START_SECONDS = 180.0
STOP_SECONDS = 60.0
RUN_SECONDS = 900.0
STOP_SIGNALS = {"postgres": signal.SIGINT}
"""The signal by which an image's container is stopped, where it is not SIGTERM."""


@dataclass
class Servers:
    """The services of compose.yaml that were started, and where they write."""

    folder: Path
    """Homes, logs and the data volume."""
    databases: Path
    """Data of PostgreSQL and Redis, which do not run as root: in a folder that their users can reach."""
    compose: Compose
    secrets: dict[str, str]
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    opened: list[httpx.Client] = field(default_factory=list)

    @property
    def prefect_api(self) -> str:
        """Address of Prefect's API."""
        return f"http://{self.compose.address('prefect')}:4200/api"

    @property
    def mlflow(self) -> str:
        """Address of the MLflow server."""
        return f"http://{self.compose.address('mlflow')}:5000"

    def client(self) -> httpx.Client:
        """Return an HTTP client of Prefect's API, with login and CSRF token."""
        client = prefect_client(self.prefect_api, self.secrets["PREFECT_AUTH"], "test")
        self.opened.append(client)
        return client

    def log(self, name: str) -> Path:
        """Return the file with a service's output."""
        return self.folder / "logs" / f"{name}.log"

    def environment(self, name: str) -> dict[str, str]:
        """Return the whole environment of a service: that of its container, and a home folder."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return {"HOME": str(home)} | self.compose.environment(name)

    def start(self, *names: str) -> None:
        """Start services, and return when they are healthy."""
        for name in names:
            command, cwd = self._command(name)
            self.processes[name] = self.spawn(name, command, cwd)
        for name in names:
            self._wait(name, lambda name=name: self._is_healthy(name))

    def stop(self, *names: str, number: signal.Signals | None = None) -> None:
        """Stop services, as the engine would or by another signal, and return when they have ended."""
        for name in names:
            self.processes[name].send_signal(number or STOP_SIGNALS.get(name, signal.SIGTERM))
        for name in names:
            self.processes.pop(name).wait(timeout=STOP_SECONDS)

    def query(self, role: str, database: str, statement: str) -> "subprocess.CompletedProcess[str]":
        """Run a statement over the network, with the password of a role."""
        words = ["psql", "--no-psqlrc", "--no-align", "--tuples-only", "--username", role, "--dbname", database]
        password = {"PGPASSWORD": self.secrets[f"{role.upper()}_DB_PASSWORD"]}
        return self._tool([*words, "--host", self.compose.address("postgres"), "--command", statement], password)

    def redis(self, *words: str, password: str | None) -> str:
        """Return the answer of Redis to a command, with or without a password."""
        login = {} if password is None else {"REDISCLI_AUTH": password}
        done = self._tool(["redis-cli", "-h", self.compose.address("redis"), *words], login)
        return done.stdout.strip()

    def command_lines(self) -> list[str]:
        """Return the command lines of all processes of this machine."""
        # `info` and not `cmdline()`, which raises if the process has ended.
        return [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]

    def files(self) -> list[Path]:
        """Return all files that services wrote, without those that are there to hold secrets."""
        written = [path for base in (self.folder, self.databases) for path in base.rglob("*") if path.is_file()]
        return [path for path in written if path.name not in {".env", "redis.conf"}]

    def secret_values(self) -> list[str]:
        """Return all secrets, logins by their password and also as a header has them."""
        values = [value.rpartition(":")[2] for value in self.secrets.values()]
        logins = [value for name, value in self.secrets.items() if name.endswith("_AUTH")]
        return values + [authorization(login)["Authorization"].removeprefix("Basic ") for login in logins]

    def _tool(self, command: list[str], variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, env={"PATH": SERVER_PATH} | variables, capture_output=True, text=True, timeout=60, check=False
        )

    def _user(self, name: str) -> dict[str, Any]:
        """Return the arguments of Popen for the user of a service; without root, it runs as this one."""
        user = self.compose.service(name).get("user")
        return {"user": user, "group": user, "extra_groups": []} if user and os.geteuid() == 0 else {}

    def spawn(self, name: str, command: list[str] | None = None, cwd: Path = ROOT) -> "subprocess.Popen[bytes]":
        """Start a service's process, in its environment and as its user; by default, with its own command."""
        log = self.log(name)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            return subprocess.Popen(
                command or self.compose.command(name),
                cwd=cwd,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._user(name),
            )

    def _command(self, name: str) -> tuple[list[str], Path]:
        if name == "postgres":
            return self._postgres_command()
        if name == "redis":
            return self._redis_command()
        return self.compose.command(name), ROOT

    def _own_folder(self, name: str) -> Path:
        folder = self.databases / name
        if not folder.exists():
            folder.mkdir(mode=0o700)
            if user := self._user(name):
                shutil.chown(folder, user["user"], user["group"])
        return folder

    def _redis_command(self) -> tuple[list[str], Path]:
        folder = self._own_folder("redis")
        file = folder / "redis.conf"
        file.write_text(f"{self.compose.config('redis')}\nbind {self.compose.address('redis')}\n")
        inside = self.compose.service("redis")["configs"][0]["target"]
        return [str(file) if word == inside else word for word in self.compose.command("redis")], folder

    def _postgres_command(self) -> tuple[list[str], Path]:
        """Return the command of PostgreSQL; the first call creates its data as the image's entry point does."""
        folder = self._own_folder("postgres")
        command = ["postgres", "-D", str(folder / "data"), "-c", f"unix_socket_directories={folder}", "-c"]
        if not (folder / "data").exists():
            self._create_database(folder, [*command, "listen_addresses="])
        return [*command, f"listen_addresses={self.compose.address('postgres')}"], folder

    def _create_database(self, folder: Path, command: list[str]) -> None:
        environment, user = self.environment("postgres"), self._user("postgres")
        password = folder / "password"
        password.write_text(environment["POSTGRES_PASSWORD"])
        password.chmod(0o644)  # in a folder that only its user can open
        create = ["initdb", "--pgdata", str(folder / "data"), "--username", "postgres", "--pwfile", str(password)]
        local = ["--auth-local", "trust", "--auth-host", "scram-sha-256"]
        subprocess.run([*create, *local], env=environment, cwd=folder, check=True, capture_output=True, **user)
        password.unlink()
        server = self.spawn("postgres", command, folder)
        ready = ["pg_isready", "--host", str(folder), "--username", "postgres"]
        self._wait("postgres", lambda: self._tool(ready, {}).returncode == 0, server)
        statements = [
            "psql",
            "--no-psqlrc",
            "--set",
            "ON_ERROR_STOP=1",
            "--host",
            str(folder),
            "--username",
            "postgres",
        ]
        init = self.compose.config("databases")
        subprocess.run(
            statements, env=environment, cwd=folder, input=init, text=True, check=True, capture_output=True, **user
        )
        server.send_signal(signal.SIGINT)
        server.wait(timeout=STOP_SECONDS)

    def _is_healthy(self, name: str) -> bool:
        check = self.compose.health_check(name)
        done = subprocess.run(check, env=self.environment(name), cwd=ROOT, capture_output=True, check=False)
        return done.returncode == 0

    def _wait(self, name: str, is_ready: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None) -> None:
        process = process or self.processes[name]
        deadline = time.monotonic() + START_SECONDS
        while not is_ready():
            assert process.poll() is None, self.log(name).read_text()
            assert time.monotonic() < deadline, f"{name} is not healthy: {self.log(name).read_text()}"
            time.sleep(1.0)


@contextmanager
def databases_folder() -> Iterator[Path]:
    """Return a folder for the databases until the end of the block, or skip the test where a program is missing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SERVER_PATH) is None]
    if missing:
        pytest.skip(f"needs PostgreSQL and Redis (Debian: postgresql, redis-server): {', '.join(missing)} not found")
    # Not pytest's folder, which only root may enter where root runs the tests; short, as sockets' paths must be.
    folder = Path(tempfile.mkdtemp(prefix="lakevision-databases-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def running_servers(folder: Path, settings: Mapping[str, str]) -> Iterator[Servers]:
    """Run databases, servers and registration; a test starts workers itself.

    Args:
        folder: Empty folder for everything that the services write.
        settings: Variables of docker/.env besides the generated secrets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir()
    secrets = generated_secrets(folder)
    with databases_folder() as databases:
        compose = Compose(secrets | dict(settings), folder / "data")
        servers = Servers(folder, databases, compose, secrets)
        try:
            servers.start("postgres", "redis")
            # Registration waits for the server itself, and its imports take seconds.
            registration = servers.spawn("deploy")
            servers.start("prefect", "mlflow")
            assert registration.wait(timeout=START_SECONDS) == 0, servers.log("deploy").read_text()
            yield servers
        finally:
            for client in servers.opened:
                client.close()
            # In the order in which compose stops them: what depends on another service first.
            for name in reversed(servers.processes.copy()):
                servers.stop(name)


def submit(servers: Servers, deployment: str, config: Mapping[str, Any]) -> str:
    """Submit a run of a deployment with settings besides its presets, and return its id."""
    api = servers.client()
    found = api.get(f"/deployments/name/{deployment}/{deployment}").raise_for_status().json()
    parameters = {"config": found["parameters"]["config"] | dict(config)}
    created = api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters})
    return str(created.raise_for_status().json()["id"])


def wait_for_state(servers: Servers, run: str, kind: str) -> dict[str, Any]:
    """Wait until a flow run is in a state of this type, and return it; a run that ends in another one fails."""
    api = servers.client()
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        found: dict[str, Any] = api.get(f"/flow_runs/{run}").raise_for_status().json()
        if found["state_type"] == kind:
            return found
        message = (found["state_type"], found["state"]["message"], servers.log("worker-cpu").read_text()[-4000:])
        assert found["state_type"] in {"SCHEDULED", "PENDING", "RUNNING"}, message
        assert time.monotonic() < deadline, message
        time.sleep(0.5)


def task_runs(servers: Servers) -> list[dict[str, Any]]:
    """Return the task runs of all flow runs."""
    found: list[dict[str, Any]] = servers.client().post("/task_runs/filter", json={}).raise_for_status().json()
    return found


def stage_of(task_run: Mapping[str, Any]) -> str:
    """Return the name of the stage of a task run, to whose name Prefect adds a suffix."""
    return str(task_run["name"]).rpartition("-")[0]


def wait_for_task(servers: Servers, stage: str, kind: str) -> None:
    """Wait until a task run of a stage is in a state of this type."""
    deadline = time.monotonic() + RUN_SECONDS
    while (stage, kind) not in [(stage_of(task), task["state_type"]) for task in task_runs(servers)]:
        assert time.monotonic() < deadline, servers.log("worker-cpu").read_text()[-4000:]
        time.sleep(0.5)
