"""Runs that wait in place of training runs, submitted to a real server by a flow in a process of its own."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from prefect.client.orchestration import SyncPrefectClient

from deployments.stack.processes import SERVER, LocalStack
from tasks.system.listening import free_port
from tests.builders.processes import ROOT, run_python
from tests.builders.waiting_flow import DEPLOY, SUBMIT

WAIT_SECONDS = 240.0


@contextmanager
def running_server(home: Path) -> Iterator[LocalStack]:
    """Run a server with pools and the waiting deployment, without workers."""
    running = LocalStack(home, free_port())
    running.start_server()
    try:
        running.wait_for("/api/health", SERVER)
        run_code(running, DEPLOY)
        yield running
    finally:
        running.end()


def run_code(stack: LocalStack, code: str) -> list[str]:
    """Run code against the server, and return its lines."""
    done = run_python("-c", code, environment=stack.environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def prefect_command(*arguments: str) -> list[str]:
    """Return the command that runs Prefect's CLI with this interpreter."""
    return [sys.executable, "-m", "prefect", *arguments]


def worker_command(pool: str, *options: str) -> list[str]:
    """Return the command of a worker of a process pool, as `make up` starts it."""
    return [sys.executable, "-m", "deployments.stack.prefect_worker", "--pool", pool, *options]


def start_worker(
    stack: LocalStack, *, ends_lost_runs: bool = False, client_retries: int = 5
) -> "subprocess.Popen[bytes]":
    """Start a worker of the pool `gpu`; with `ends_lost_runs`, it first ends the runs that its predecessor left.

    Args:
        stack: The server.
        ends_lost_runs: Whether to end them.
        client_retries: Number of retries of each request, also of its runs.
    """
    command = worker_command("gpu")
    if ends_lost_runs:
        command = [sys.executable, "-m", "deployments.worker", "--pool", "gpu"]
    stack.start("worker-gpu", ["env", f"PREFECT_CLIENT_MAX_RETRIES={client_retries}", *command])
    return next(process for name, process in reversed(stack._processes) if name == "worker-gpu")


def end_worker(stack: LocalStack, worker: "subprocess.Popen[bytes]") -> None:
    """End a worker, or forget it if it was killed."""
    worker.terminate()
    worker.wait(timeout=60)
    stack._processes.remove(("worker-gpu", worker))


def kill_server(stack: LocalStack) -> None:
    """Kill the server; requests are refused, and not kept waiting."""
    server = dict(stack._processes)[SERVER]
    server.kill()
    server.wait()
    stack._processes.remove((SERVER, server))
    stack.release_ports()


def restart_server(stack: LocalStack) -> None:
    """Start the killed server again, and wait until it answers."""
    stack.start_server()
    stack.wait_for("/api/health", SERVER)


def start_submitter(
    stack: LocalStack, folder: Path, seconds: float, *, client_retries: int = 5, **settings: object
) -> "subprocess.Popen[str]":
    """Start a process whose flow submits the waiting deployment and waits.

    Args:
        stack: The server.
        folder: Folder that is created, for the id of the submitted run's process.
        seconds: How long the submitted run waits.
        client_retries: Number of retries of each request; without them, a request during an outage fails at once.
        settings: Settings of DistributedConfig.
    """
    folder.mkdir()
    given = {"deployment": "waiting/waiting", "job_variables": {"env": {"PYTHONPATH": str(ROOT)}}} | settings
    return subprocess.Popen(
        [sys.executable, "-c", SUBMIT, str(folder), str(seconds), json.dumps(given)],
        cwd=ROOT,
        env=stack.environment | {"PREFECT_CLIENT_MAX_RETRIES": str(client_retries)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def process_of(folder: Path) -> psutil.Process:
    """Return the process of the submitted run, once it waits."""
    wait_until(lambda: list(folder.glob("*.pid")))
    (file,) = folder.glob("*.pid")
    return psutil.Process(int(file.stem))


def client_of(stack: LocalStack) -> SyncPrefectClient:
    """Return a client of the server, which repeats requests that fail while the server is busy."""
    return SyncPrefectClient(f"{stack.url}/api", auth_string=stack.auth_string)


def states(stack: LocalStack) -> dict[str, str]:
    """Return the types of the states of the runs on the pool, by name."""
    with client_of(stack) as client:
        runs = client.read_flow_runs()
    return {
        run.name: run.state.type.value
        for run in runs
        if run.state and run.deployment_id and run.work_pool_name == "gpu"
    }


def submitted_name(printed: str) -> str:
    """Return the name of the run that the submitter printed."""
    (name,) = re.findall(r"^submitted (\S+)$", printed, re.MULTILINE)
    return str(name)
