"""A Prefect server, its work pools and workers, and MLflow's UI on this machine: started together, ended together."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import filelock
import psutil

from tasks.environment import MLFLOW_PORT
from tasks.errors import WrongInput

HOST = "127.0.0.1"
PREFECT_PORT = 4200
"""Of the Prefect server, if $LAKEVISION_PORT names no other."""
STACK_MARK = "LAKEVISION_STACK"
"""Environment variable that every process of one stack inherits: what carries it at the end is ended too."""

START_SECONDS = 120.0
END_SECONDS = 20.0
ROOT = Path(__file__).resolve().parent.parent


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


@dataclass
class LocalStack:
    """The processes of one stack, and the environment in which commands find its server."""

    home: Path
    port: int
    mlflow_port: int = MLFLOW_PORT
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _processes: list[tuple[str, "subprocess.Popen[bytes]"]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Address of the Prefect UI."""
        return f"http://{HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the stack's processes."""
        binaries = str(Path(sys.executable).parent)
        return os.environ | {
            STACK_MARK: self.mark,
            "LAKEVISION_HOME": str(self.home),
            "LAKEVISION_TRACKING_URI": "",  # this stack tracks under its own home
            "LAKEVISION_MLFLOW_UI": f"http://{HOST}:{self.mlflow_port}",
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_PROFILES_PATH": str(self.home / "prefect" / "profiles.toml"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # A run starts within 2 s of its submission and not within 10: the server is on this machine.
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # On disk like the slots they stand for: in memory, a killed server would never give them back.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONUNBUFFERED": "1",
        }

    def _log(self, name: str) -> IO[bytes]:
        logs = self.home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return (logs / f"{name}.log").open("ab")

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process that runs until the stack ends; its output goes to logs/NAME.log."""
        with self._log(name) as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches it through this process, which ends things in order.
                start_new_session=True,
            )
        self._processes.append((name, process))

    def run(self, name: str, command: Sequence[str]) -> None:
        """Run a command of the stack to its end.

        Raises:
            RuntimeError: It failed; carries its last lines.
        """
        self.start(name, command)
        self.finish(name)

    def finish(self, name: str) -> None:
        """Wait until the process `name`, which is no server, has done its work.

        Raises:
            RuntimeError: It failed; carries its last lines.
        """
        process = dict(self._processes)[name]
        status = process.wait()
        self._processes.remove((name, process))
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}; {self._last_lines(name)}")

    def _last_lines(self, name: str) -> str:
        log = self.home / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines()[-15:]
        return f"the end of {log}:\n" + "\n".join(lines)

    def wait_for(self, url: str, name: str) -> None:
        """Wait until `url` answers, while the process `name` runs.

        Raises:
            RuntimeError: The process ended, or did not answer in time.
        """
        process = dict(self._processes)[name]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=2):  # noqa: S310  # an address of our own making
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise RuntimeError(f"{name} did not start; {self._last_lines(name)}")

    def check_alive(self) -> None:
        """Raise when a process of the stack ended by itself.

        Raises:
            RuntimeError: Names the process and its log.
        """
        for name, process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with status {process.returncode}: see {self.home}/logs/{name}.log")

    def end(self) -> None:
        """End every process of the stack, the youngest first, and whatever they started; return when none is left.

        The server is the oldest: runs that end may still tell it so.
        """
        for _name, process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        # Flow runs, JVMs and ranks lead sessions of their own; they carry the mark wherever they went.
        left = [process for process in psutil.process_iter() if _carries(process, self.mark)]
        for straggler in left:
            straggler.terminate()
        _gone, left = psutil.wait_procs(left, timeout=END_SECONDS / 2)
        for straggler in left:
            straggler.kill()
        psutil.wait_procs(left, timeout=END_SECONDS)


def _carries(process: psutil.Process, mark: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        environment: Mapping[str, str] = process.environ()
    except psutil.Error:
        return False
    return environment.get(STACK_MARK) == mark


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
