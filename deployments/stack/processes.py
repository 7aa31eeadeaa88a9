"""The processes of a stack on this machine: their start, environment, logs and complete shutdown."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

from deployments.stack.login import MLFLOW_LOGIN, OWN_STRING, auth_string, authorization, prepare_folder
from tasks.environment import MLFLOW_PORT, no_proxy, without_prefect_login
from tasks.storage import tracking_file
from tasks.system.home import make_private_file, rotate
from tasks.system.listening import HOST, LOCAL_NAMES, listen, refuse_connections

REPORT_SECONDS = 15.0
"""Interval of the messages about the process that the stack waits for."""

END_SECONDS = 20.0

SERVER = "prefect-server"
MLFLOW_UI = "mlflow-ui"
SERVICE = "service"

SERVICE_PORT = 8000
"""Default port of the service; $LAKEVISION_SERVE_PORT overrides it."""

DISPENSABLE = frozenset({MLFLOW_UI, SERVICE})
"""Processes without which the others continue."""

ENDING = frozenset({"register"})
"""Processes that exit when their work is done."""

STACK_MARK = "LAKEVISION_STACK"
"""Environment variable that every process of one stack inherits, and by which the last of them are found."""

ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    """Print a message for the user."""
    print(f"==> {text}", flush=True)


def end_marked(mark: str, seconds: float) -> None:
    """End every process with a mark except this one, and return when none is left.

    Args:
        mark: The mark of one stack.
        seconds: Processes are killed after half of this time.
    """
    # Flow runs, JVMs and ranks have their own sessions, but inherit the mark. Environments of other users are None.
    remaining = [
        process
        for process in psutil.process_iter(["environ"])
        if process.pid != os.getpid() and (process.info["environ"] or {}).get(STACK_MARK) == mark
    ]
    for process in remaining:
        process.terminate()
    _gone, remaining = psutil.wait_procs(remaining, timeout=seconds / 2)
    for process in remaining:
        process.kill()
    psutil.wait_procs(remaining, timeout=seconds)


@dataclass
class LocalStack:
    """The processes of one stack, and the environment that commands need to connect to its server."""

    home: Path
    port: int
    mlflow_port: int = MLFLOW_PORT
    service_port: int = SERVICE_PORT
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _processes: list[tuple[str, "subprocess.Popen[bytes]"]] = field(default_factory=list)
    _sockets: dict[str, socket.socket] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Address of the Prefect UI."""
        return f"http://{HOST}:{self.port}"

    @cached_property
    def auth_string(self) -> str:
        """Login of the server, `user:password`."""
        return auth_string(self.home)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the stack's processes, and of commands that connect to its server."""
        return os.environ | {
            STACK_MARK: self.mark,
            "LAKEVISION_HOME": str(self.home),
            # One tracking database for all runs of the stack, whatever their `storage.home`: its UI shows this one.
            "LAKEVISION_TRACKING_URI": tracking_file(str(self.home)),
            "LAKEVISION_MLFLOW_UI": f"http://{HOST}:{self.mlflow_port}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_PROFILES_PATH": str(self.home / "prefect" / "profiles.toml"),
            "PREFECT_API_URL": f"{self.url}/api",
            # In the environment: other users of the machine cannot read it, but they can read a command line.
            "PREFECT_API_AUTH_STRING": self.auth_string,
            OWN_STRING: self.auth_string,
            "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
            # The UI's own origin, by both host names that a browser on this machine may use.
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{self.port}" for name in LOCAL_NAMES),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # A run starts within 1 s of its submission, not within the default of 10 s: the server is local.
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            # The shortest interval, so that a run whose process is gone is found soon.
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            # On disk, like the concurrency slots: leases in memory die with a killed server, whose slots stay taken.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONUNBUFFERED": "1",
            **no_proxy(os.environ),
        }

    def log_file(self, name: str) -> Path:
        """Return the file with the output of the process `name`."""
        return self.home / "logs" / f"{name}.log"

    def hold_ports(self, *names: str) -> None:
        """Listen on the ports of the named servers, SERVER, MLFLOW_UI and SERVICE, until the stack ends.

        Raises:
            WrongInput: A port is in use.
        """
        for name in names:
            port, what, setting = {
                SERVER: (self.port, "the Prefect server", "LAKEVISION_PORT"),
                MLFLOW_UI: (self.mlflow_port, "the MLflow UI", "LAKEVISION_MLFLOW_PORT"),
                SERVICE: (self.service_port, "the service", "LAKEVISION_SERVE_PORT"),
            }[name]
            way_out = f"set {setting} to a free port (and LAKEVISION_HOME, if another stack uses it)"
            self._sockets[name] = listen(port, what, way_out)

    def release_ports(self) -> None:
        """Close all sockets of `hold_ports`."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def start_server(self) -> None:
        """Start the Prefect server.

        Raises:
            WrongInput: Its port is in use, or its folder does not belong to this user.
        """
        prepare_folder(self.home)
        make_private_file(self.home / "prefect" / "prefect.db")
        self._serve(SERVER, "deployments.stack.prefect_server", self.port)

    def start_mlflow_ui(self) -> None:
        """Start MLflow's UI."""
        self._serve(MLFLOW_UI, "deployments.stack.mlflow_ui", self.mlflow_port)

    def start_service(self) -> None:
        """Start the service of the champion of the newest tables.

        Raises:
            WrongInput: Its port is in use.
        """
        self.hold_ports(SERVICE)
        descriptor, settings = str(self._sockets[SERVICE].fileno()), json.dumps({"serve": {"port": self.service_port}})
        options = ["--fd", descriptor, "--parent", str(os.getpid())]
        self.start(SERVICE, [sys.executable, "-m", "tasks.serve.server", settings, *options])

    def _serve(self, name: str, module: str, port: int) -> None:
        if name not in self._sockets:
            self.hold_ports(name)
        descriptor = str(self._sockets[name].fileno())
        self.start(name, [sys.executable, "-m", module, "--port", str(port), "--fd", descriptor])

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process that runs until the stack ends, with its output in logs/NAME.log."""
        environment = self.environment
        if name in {MLFLOW_UI, SERVICE}:
            environment = without_prefect_login(environment)
        if name == MLFLOW_UI:
            environment[MLFLOW_LOGIN] = self.auth_string
        passed = [self._sockets[name].fileno()] if name in self._sockets else []
        self.log_file(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                # In its own session: Ctrl-C reaches only this process, which shuts the others down in order.
                start_new_session=True,
            )
        self._processes.append((name, process))

    def finish(self, name: str) -> None:
        """Wait until the process `name`, one of ENDING, has finished.

        Raises:
            RuntimeError: It failed, or the server has ended; the message has the last lines of the log.
        """
        process = dict(self._processes)[name]
        self.wait_until(lambda: process.poll() is not None, name, SERVER, name)
        self.check_alive(name)
        self._processes.remove((name, process))

    def _last_lines(self, name: str) -> str:
        log = self.log_file(name)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        return f"the end of {log}:\n" + "\n".join(lines)

    def wait_for(self, path: str, name: str) -> None:
        """Wait until the Prefect server answers at `path`, and report the wait from time to time.

        Args:
            path: Path of the URL.
            name: The process that makes the path available.

        Raises:
            RuntimeError: The server or the process has ended.
        """
        headers = authorization(self.auth_string)
        self.wait_until(lambda: self.answers(f"{self.url}{path}", headers), name, SERVER, name)

    def wait_until(self, is_done: Callable[[], bool], awaited: str, *watched: str) -> None:
        """Wait until a condition holds, and print the awaited process every REPORT_SECONDS.

        Args:
            is_done: Returns whether the condition holds.
            awaited: Name of the process that the condition depends on.
            watched: Processes that must not end meanwhile, as `check_alive`.

        Raises:
            RuntimeError: As `check_alive`.
        """
        began = reported = time.monotonic()
        while not is_done():
            self.check_alive(*watched)
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                say(f"waiting for {awaited} for {reported - began:.0f} s; its log: {self.log_file(awaited)}")
            time.sleep(0.1)

    def answers(self, url: str, headers: Mapping[str, str] | None = None) -> bool:
        """Return whether `url` answers; no proxy is used, since the server is local and the header has the login."""
        request = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310  # the URL is built here
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2):
                return True
        except OSError:
            return False

    def is_running(self, name: str) -> bool:
        """Return whether the process `name` was started and `check_alive` has not found it ended."""
        return name in dict(self._processes)

    def check_alive(self, *names: str) -> None:
        """Check that the processes of the stack run; for one of DISPENSABLE, only print a warning. Rotate their logs.

        Args:
            names: Processes to check; all of them if none is given.

        Raises:
            RuntimeError: A process has ended; the message names it and has the last lines of its log.
        """
        for name, process in list(self._processes):
            rotate(self.log_file(name))
            if names and name not in names:
                continue
            if process.poll() is None or (name in ENDING and process.returncode == 0):
                continue
            if name not in DISPENSABLE:
                raise RuntimeError(f"{name} ended with status {process.returncode}; {self._last_lines(name)}")
            self._processes.remove((name, process))
            if name in self._sockets:
                refuse_connections(self._sockets[name])
            say(f"warning: {name} ended with status {process.returncode}; the rest continues. {self._last_lines(name)}")

    def end(self) -> None:
        """End all processes of the stack and their descendants, in reverse order of start; return when none is left.

        The server ends last, so that runs which are interrupted can still report their final state.
        """
        for _name, process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        # Closed before the remaining processes end: their requests are refused at once instead of waiting.
        self.release_ports()
        end_marked(self.mark, END_SECONDS)
