"""The processes of a stack on this machine: their environment and logs, and an end that leaves none of them."""

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

from deployments.login import auth_string, authorization, prepare_folder
from deployments.ports import HOST, listen, refuse_connections
from deployments.stack_environment import mlflow_environment, stack_environment
from deployments.stack_mark import STACK_MARK, end_marked
from tasks.environment import MLFLOW_PORT
from tasks.system.home import make_private_file

SAY_SECONDS = 15.0
"""How often a user is told what the stack waits for."""

END_SECONDS = 20.0

SERVER = "prefect-server"
MLFLOW_UI = "mlflow-ui"

DISPENSABLE = frozenset({MLFLOW_UI})
"""Processes without which the others go on."""

ENDING = frozenset({"register"})
"""Processes that end when their work is done."""

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    """Print what happens to a user."""
    print(f"==> {text}", flush=True)


@dataclass
class LocalStack:
    """The processes of one stack, and the environment in which commands find its server."""

    home: Path
    port: int
    mlflow_port: int = MLFLOW_PORT
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _processes: list[tuple[str, "subprocess.Popen[bytes]"]] = field(default_factory=list)
    _sockets: dict[str, socket.socket] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Address of the Prefect UI."""
        return f"http://{HOST}:{self.port}"

    @cached_property
    def auth_string(self) -> str:
        """What the server asks for, `user:password`."""
        return auth_string(self.home)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the stack's processes, and of commands that talk to its server."""
        return stack_environment(self.home, self.port, self.mlflow_port, self.auth_string) | {STACK_MARK: self.mark}

    def log_file(self, name: str) -> Path:
        """Return the file with the output of the process `name`."""
        return self.home / "logs" / f"{name}.log"

    def _log(self, name: str) -> IO[bytes]:
        file = self.log_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("ab")

    def hold_ports(self, *names: str) -> None:
        """Listen on the ports of SERVER and MLFLOW_UI, as they are named, until the stack ends.

        Raises:
            WrongInput: Something listens there already.
        """
        for name in names:
            port, what, setting = {
                SERVER: (self.port, "the Prefect server", "LAKEVISION_PORT"),
                MLFLOW_UI: (self.mlflow_port, "the MLflow UI", "LAKEVISION_MLFLOW_PORT"),
            }[name]
            way_out = f"set {setting} to a free port (and LAKEVISION_HOME, if that is another stack)"
            self._sockets[name] = listen(port, what, way_out)

    def release_ports(self) -> None:
        """Listen on none of them any more."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def start_server(self) -> None:
        """Start the Prefect server.

        Raises:
            WrongInput: Something listens on its port, or its folder is not this user's own.
        """
        prepare_folder(self.home)
        make_private_file(self.home / "prefect" / "prefect.db")
        self._serve(SERVER, "deployments.prefect_server", self.port)

    def start_mlflow_ui(self) -> None:
        """Start MLflow's UI."""
        self._serve(MLFLOW_UI, "deployments.mlflow_ui", self.mlflow_port)

    def _serve(self, name: str, module: str, port: int) -> None:
        if name not in self._sockets:
            self.hold_ports(name)
        descriptor = str(self._sockets[name].fileno())
        self.start(name, [sys.executable, "-m", module, "--port", str(port), "--fd", descriptor])

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process that runs until the stack ends; its output goes to logs/NAME.log."""
        environment = self.environment
        if name == MLFLOW_UI:
            environment = mlflow_environment(environment, self.auth_string)
        passed = [self._sockets[name].fileno()] if name in self._sockets else []
        with self._log(name) as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
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
        """Wait until the process `name`, one of ENDING, has done its work.

        Raises:
            RuntimeError: It failed, or the server has ended; carries the last lines of its log.
        """
        process = dict(self._processes)[name]
        waiting = Waiting(self, name)
        while process.poll() is None:
            self.check_alive(SERVER, name)
            waiting.tell()
            time.sleep(0.1)
        self.check_alive(name)
        self._processes.remove((name, process))

    def _last_lines(self, name: str) -> str:
        log = self.log_file(name)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        return f"the end of {log}:\n" + "\n".join(lines)

    def wait_for(self, path: str, name: str) -> None:
        """Wait until the Prefect server answers at `path`, while it and `name` run, and tell a user what for.

        Args:
            path: What comes after the server's address.
            name: The process that makes it answer.

        Raises:
            RuntimeError: One of the two ended.
        """
        waiting = Waiting(self, name)
        while not self.answers(f"{self.url}{path}", authorization(self.auth_string)):
            self.check_alive(SERVER, name)
            waiting.tell()
            time.sleep(0.3)

    def answers(self, url: str, headers: Mapping[str, str] | None = None) -> bool:
        """Return whether `url` answers, past any proxy: it is on this machine, and the login is for nobody else."""
        request = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310  # an address of our own making
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def runs(self, name: str) -> bool:
        """Return whether the process `name` is there and nobody was told that it ended."""
        return name in dict(self._processes)

    def check_alive(self, *names: str) -> None:
        """Raise when a process of the stack ended by itself; warn of one that the others can do without.

        Args:
            names: Those that are looked at; none given means all.

        Raises:
            RuntimeError: Names the process, and carries the last lines of its log.
        """
        for name, process in list(self._processes):
            if names and name not in names:
                continue
            if process.poll() is None or (name in ENDING and process.returncode == 0):
                continue
            if name not in DISPENSABLE:
                raise RuntimeError(f"{name} ended with status {process.returncode}; {self._last_lines(name)}")
            self._processes.remove((name, process))
            if name in self._sockets:
                refuse_connections(self._sockets[name])
            say(f"warning: {name} ended with status {process.returncode}; the rest goes on. {self._last_lines(name)}")

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
        # Closed before what may still ask there ends: a refused connection fails at once.
        self.release_ports()
        end_marked(self.mark, END_SECONDS)


@dataclass
class Waiting:
    """What a stack waits for, told to a user from time to time."""

    stack: LocalStack
    name: str
    began: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def tell(self) -> None:
        """Print what is waited for, and since when, if nothing was said of it for a while."""
        now = time.monotonic()
        if now - self.told >= SAY_SECONDS:
            self.told = now
            say(f"waiting for {self.name} for {now - self.began:.0f} s; its log: {self.stack.log_file(self.name)}")
