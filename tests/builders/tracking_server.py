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

from tests.builders.processes import free_port, plain_environment

START_SECONDS = 90.0


class TrackingServer:
    """MLflow on a database file, which serves artifacts, in a process group of its own."""

    def __init__(self, database: str, log: Path) -> None:
        self._database, self._log, self._port = database, log, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
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
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self._database]
        command += ["--artifacts-destination", str(self._log.with_name("served"))]
        with self._log.open("ab") as log:
            self._running = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"],
                stdout=log,
                stderr=log,
                env=plain_environment(),
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5):
                return
            time.sleep(0.2)
        raise RuntimeError(self._log.read_text())

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
