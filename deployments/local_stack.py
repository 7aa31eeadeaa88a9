"""A Prefect server, its work pools and workers, and MLflow's UI on this machine: started together, ended together."""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import filelock

from deployments.stack_processes import HOST, LocalStack
from tasks.environment import MLFLOW_PORT
from tasks.errors import WrongInput

PREFECT_PORT = 4200
"""Of the Prefect server, if $LAKEVISION_PORT names no other."""


def port_setting(name: str, default: int) -> int:
    """Return the port that the environment variable `name` gives, or the default.

    Raises:
        WrongInput: It is no port.
    """
    given = os.environ.get(name) or str(default)
    if not given.isdecimal() or not 1 <= int(given) <= 65535:
        raise WrongInput(f"{name} is '{given}', which is no port: give a number from 1 to 65535")
    return int(given)


def check_port(port: int, what: str, setting: str) -> None:
    """Refuse a port on which something listens already.

    Raises:
        WrongInput: Names the port, what it is for, and the way out.
    """
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise WrongInput(
                f"port {port} for {what} is in use: stop what listens there ('ss -ltnp' names it), "
                f"or set {setting} to a free port (and LAKEVISION_HOME, if that is another stack)"
            ) from None


def prefect_command(*arguments: str) -> list[str]:
    """Return the command that runs Prefect's command line with this interpreter."""
    return [sys.executable, "-m", "prefect", *arguments]


def _have_to_ourselves(home: Path) -> filelock.BaseFileLock:
    """Lock the home until this process ends: a second stack on its database would take our runs for abandoned ones.

    Raises:
        WrongInput: Another stack has it.
    """
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(home / "prefect" / "stack.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise WrongInput(
            f"another stack runs on '{home}': end that one (make demo, make up), "
            "or set LAKEVISION_HOME to another folder"
        ) from None
    return lock


@contextmanager
def local_stack(home: Path, port: int, mlflow_port: int | None = None) -> Iterator[LocalStack]:
    """Run server, pools, deployments and workers, and MLflow's UI where it is asked for, until the block ends.

    Raises:
        WrongInput: A port is in use, or another stack runs on this home.
    """
    check_port(port, "the Prefect server", "LAKEVISION_PORT")
    if mlflow_port is not None:
        check_port(mlflow_port, "the MLflow UI", "LAKEVISION_MLFLOW_PORT")
    stack = LocalStack(home, port, mlflow_port or port_setting("LAKEVISION_MLFLOW_PORT", MLFLOW_PORT))
    began = datetime.now(UTC).isoformat()
    lock = _have_to_ourselves(home)
    try:
        say(f"starting a Prefect server on {stack.url} (data in {home}/prefect, logs in {home}/logs)")
        stack.start("prefect-server", prefect_command("server", "start", "--host", HOST, "--port", str(port)))
        stack.start("register", [sys.executable, "-m", "deployments.register", began])
        stack.wait_for(f"{stack.url}/api/health", "prefect-server")
        say("work pools cpu and gpu, deployments of deployments/prefect.yaml, one worker a pool")
        # Workers start while the deployments are registered; the pools are there before either.
        stack.wait_for(f"{stack.url}/api/work_pools/gpu", "register")
        for pool in ("cpu", "gpu"):
            command = prefect_command(
                "worker", "start", "--pool", pool, "--type", "process", "--name", f"{pool}-worker"
            )
            stack.start(f"worker-{pool}", command)
        stack.finish("register")
        if mlflow_port is not None:
            start_mlflow_ui(stack, mlflow_port)
        yield stack
    finally:
        with uninterrupted():
            with suppress(OSError):  # The terminal may be gone; what was started must end all the same.
                say("ending server and workers")
            stack.end()
            lock.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no second Ctrl-C or SIGTERM break off what ends the stack."""
    saved = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


def start_mlflow_ui(stack: LocalStack, port: int) -> None:
    """Start MLflow's UI on the runs under the stack's home."""
    from tasks.config import StorageConfig
    from tasks.storage import resolve_storage, tracking_file
    from tasks.tracking import prepare_tracking

    # The stack's own database, as its workers have it, whatever this process's environment names.
    storage = resolve_storage(StorageConfig(home=str(stack.home), tracking=tracking_file(str(stack.home))))
    prepare_tracking(storage)
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", storage.tracking]
    stack.start("mlflow-ui", [*command, "--host", HOST, "--port", str(port)])
    stack.wait_for(f"http://{HOST}:{port}/health", "mlflow-ui")


def say(text: str) -> None:
    """Tell a person what happens."""
    width = shutil.get_terminal_size().columns
    print(f"==> {text}"[: max(width, 200)], flush=True)
