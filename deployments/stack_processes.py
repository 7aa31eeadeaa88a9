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
from pathlib import Path
from typing import IO

import psutil

from tasks.environment import MLFLOW_PORT

HOST = "127.0.0.1"
STACK_MARK = "LAKEVISION_STACK"
"""Environment variable that every process of one stack inherits: what carries it at the end is ended too."""

START_SECONDS = 120.0
END_SECONDS = 20.0
ROOT = Path(__file__).resolve().parent.parent


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
