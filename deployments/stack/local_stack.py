"""The local stack: a Prefect server, its work pools and workers, and MLflow's UI as one unit."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import filelock

from deployments.stack.login import prepare_folder
from deployments.stack.processes import MLFLOW_UI, SERVER, LocalStack, say
from tasks.environment import MLFLOW_PORT
from tasks.errors import WrongInput

PREFECT_PORT = 4200
"""Default port of the Prefect server; $LAKEVISION_PORT overrides it."""


def port_setting(name: str, default: int) -> int:
    """Return the port in the environment variable `name`, or the default.

    Raises:
        WrongInput: The value is not a port.
    """
    given = os.environ.get(name) or str(default)
    if not given.isdecimal() or not 1 <= int(given) <= 65535:
        raise WrongInput(f"{name} is '{given}', which is not a port", way_out="give a number from 1 to 65535")
    return int(given)


def _lock_home(home: Path) -> filelock.BaseFileLock:
    """Acquire the exclusive lock of a home until this process ends.

    A second stack on the same database would end the runs of the first as abandoned.

    Raises:
        WrongInput: Another stack holds the lock, or the folder does not belong to this user.
    """
    if closed := prepare_folder(home):
        say(closed)
    lock = filelock.FileLock(home / "prefect" / "stack.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise WrongInput(
            f"another stack runs on '{home}'",
            way_out="stop it (make demo, make up), or set LAKEVISION_HOME to another folder",
        ) from None
    return lock


@contextmanager
def local_stack(home: Path, port: int, mlflow_port: int | None = None) -> Iterator[LocalStack]:
    """Run server, pools, deployments and workers until the block ends, and MLflow's UI where it has a port.

    MLflow's UI is started last, and is not waited for.

    Args:
        home: Home folder of the stack.
        port: Port of the Prefect server.
        mlflow_port: Port of MLflow's UI; None to run without it.

    Raises:
        WrongInput: A port is in use, or another stack runs on this home.
    """
    stack = LocalStack(home, port, mlflow_port or port_setting("LAKEVISION_MLFLOW_PORT", MLFLOW_PORT))
    began = datetime.now(UTC).isoformat()
    try:
        stack.hold_ports(*((SERVER,) if mlflow_port is None else (SERVER, MLFLOW_UI)))
        lock = _lock_home(home)
    except WrongInput:
        stack.release_ports()
        raise
    try:
        say(f"starting a Prefect server on {stack.url} (data in {home}/prefect, logs in {home}/logs)")
        stack.start_server()
        stack.start("register", [sys.executable, "-m", "deployments.stack.register", began])
        stack.wait_for("/api/health", "prefect-server")
        say("creating work pools cpu and gpu, the deployments of deployments/prefect.yaml, and one worker per pool")
        # Workers start while the deployments are registered; the pools exist before both.
        stack.wait_for("/api/work_pools/gpu", "register")
        for pool in ("cpu", "gpu"):
            worker = ["deployments.stack.prefect_worker", "--pool", pool, "--name", f"{pool}-worker"]
            stack.start(f"worker-{pool}", [sys.executable, "-m", *worker])
        stack.finish("register")
        if mlflow_port is not None:
            stack.start_mlflow_ui()
        yield stack
    finally:
        with uninterrupted():
            with suppress(OSError):  # The terminal may be gone; the processes must be stopped all the same.
                say("stopping server and workers")
            stack.end()
            lock.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP meanwhile, so that they cannot interrupt the shutdown of the stack."""
    saved = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
