"""A real tracking server that a test kills and starts again on the same port."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tasks.system.listening import free_port
from tests.builders.processes import plain_environment

START_SECONDS = 90.0


class TrackingServer:
    """MLflow on a database file, which serves artifacts, in a process group of its own."""

    def __init__(self, database: str, log: Path) -> None:
        self._log, self._port = log, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        stored = ["--backend-store-uri", database, "--artifacts-destination", str(log.with_name("served"))]
        self._command = [sys.executable, "-m", "mlflow", "server", *address, *stored]
        # Each start would start nine processes for jobs on traces and prompts, which no run has.
        self._environment = plain_environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
        self._running: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        """State of the server: true after its start, false after it was killed."""
        return self._running is not None

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        with self._log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5):
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(self._log.read_text())
        # MLflow's command takes seconds, and only starts the process that serves: later starts do without it.
        for serving in psutil.Process(self._running.pid).children():
            self._command, self._environment = serving.cmdline(), serving.environ()

    def kill(self) -> None:
        """Kill the server with SIGKILL, if it is running, and wait until it accepts no more connections."""
        process, self._running = self._running, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Its workers may end later than the process that started them.
        deadline = time.monotonic() + START_SECONDS
        with suppress(ConnectionRefusedError):
            while time.monotonic() < deadline:
                with suppress(ConnectionResetError), socket.create_connection(("127.0.0.1", self._port), timeout=5):
                    time.sleep(0.05)
