"""The processes of a stack on this machine: their environment and logs, and an end that leaves none of them."""

import os
import signal
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

import psutil

from deployments.login import OWN_STRING, auth_string, authorization
from tasks.environment import MLFLOW_PORT
from tasks.home import PRIVATE_FOLDER, make_home, make_private_file
from tasks.storage import tracking_file

HOST = "127.0.0.1"
STACK_MARK = "LAKEVISION_STACK"
"""Environment variable that every process of one stack inherits: what carries it at the end is ended too."""

SAY_SECONDS = 15.0
"""How often a user is told what the stack waits for."""

END_SECONDS = 20.0

SERVER = "prefect-server"

DISPENSABLE = frozenset({"mlflow-ui"})
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
        binaries = str(Path(sys.executable).parent)
        return os.environ | {
            STACK_MARK: self.mark,
            "LAKEVISION_HOME": str(self.home),
            # One database for all runs of the stack, whatever their `storage.home`: its MLflow UI shows this one.
            "LAKEVISION_TRACKING_URI": tracking_file(str(self.home)),
            "LAKEVISION_MLFLOW_UI": f"http://{HOST}:{self.mlflow_port}",
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_PROFILES_PATH": str(self.home / "prefect" / "profiles.toml"),
            "PREFECT_API_URL": f"{self.url}/api",
            # In the environment, which other users of the machine cannot read, and in no command line, which they can.
            "PREFECT_API_AUTH_STRING": self.auth_string,
            OWN_STRING: self.auth_string,
            "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
            # The UI's own origin, by both names that a browser on this machine may have for it.
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"{self.url},http://localhost:{self.port}",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # A run starts within 2 s of its submission and not within 10: the server is on this machine.
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # On disk like the slots they stand for: in memory, a killed server would never give them back.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            # Eight processes, for jobs on traces and prompts: nothing here asks for them.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            # Its own names only; any other Host header is refused, against DNS rebinding.
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"{HOST},{HOST}:*,localhost,localhost:*",
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{self.mlflow_port}",
            "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
            "PYTHONUNBUFFERED": "1",
        }

    def log_file(self, name: str) -> Path:
        """Return the file with the output of the process `name`."""
        return self.home / "logs" / f"{name}.log"

    def _log(self, name: str) -> IO[bytes]:
        file = self.log_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("ab")

    def start_server(self) -> None:
        """Start the Prefect server."""
        make_home(self.home)
        (self.home / "prefect").mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        make_private_file(self.home / "prefect" / "prefect.db")
        self.start(SERVER, [sys.executable, "-m", "deployments.prefect_server", "--port", str(self.port)])

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process that runs until the stack ends; its output goes to logs/NAME.log."""
        environment = self.environment
        with self._log(name) as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
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
        """Return whether `url` answers."""
        request = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310  # an address of our own making
        try:
            with urllib.request.urlopen(request, timeout=2):  # noqa: S310
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
        # Flow runs, JVMs and ranks lead sessions of their own; they carry the mark wherever they went.
        left = [process for process in psutil.process_iter() if _carries(process, self.mark)]
        for straggler in left:
            straggler.terminate()
        _gone, left = psutil.wait_procs(left, timeout=END_SECONDS / 2)
        for straggler in left:
            straggler.kill()
        psutil.wait_procs(left, timeout=END_SECONDS)


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


def _carries(process: psutil.Process, mark: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        environment: Mapping[str, str] = process.environ()
    except psutil.Error:
        return False
    return environment.get(STACK_MARK) == mark
