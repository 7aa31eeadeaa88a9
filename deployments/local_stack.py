"""A Prefect server, its work pools and workers, and MLflow's UI on this machine: started together, ended together."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import filelock

from deployments.login import prepare_folder
from deployments.stack_processes import MLFLOW_UI, SERVER, LocalStack, say
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


def prefect_command(*arguments: str) -> list[str]:
    """Return the command that runs Prefect's command line with this interpreter."""
    return [sys.executable, "-m", "prefect", *arguments]


def _have_to_ourselves(home: Path) -> filelock.BaseFileLock:
    """Lock the home until this process ends: a second stack on its database would take our runs for abandoned ones.

    Raises:
        WrongInput: Another stack has it, or its folder is not this user's own.
    """
    if closed := prepare_folder(home):
        say(closed)
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
    """Run server, pools, deployments and workers until the block ends; MLflow's UI, where it is asked for, comes later.

    Raises:
        WrongInput: A port is in use, or another stack runs on this home.
    """
    stack = LocalStack(home, port, mlflow_port or port_setting("LAKEVISION_MLFLOW_PORT", MLFLOW_PORT))
    began = datetime.now(UTC).isoformat()
    try:
        stack.hold_ports(*((SERVER,) if mlflow_port is None else (SERVER, MLFLOW_UI)))
        lock = _have_to_ourselves(home)
    except WrongInput:
        stack.release_ports()
        raise
    try:
        say(f"starting a Prefect server on {stack.url} (data in {home}/prefect, logs in {home}/logs)")
        stack.start_server()
        stack.start("register", [sys.executable, "-m", "deployments.register", began])
        stack.wait_for("/api/health", "prefect-server")
        say("work pools cpu and gpu, deployments of deployments/prefect.yaml, one worker a pool")
        # Workers start while the deployments are registered; the pools are there before either.
        stack.wait_for("/api/work_pools/gpu", "register")
        for pool in ("cpu", "gpu"):
            command = prefect_command(
                "worker", "start", "--pool", pool, "--type", "process", "--name", f"{pool}-worker"
            )
            stack.start(f"worker-{pool}", command)
        stack.finish("register")
        if mlflow_port is not None:
            stack.start_mlflow_ui()
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
