"""A service as a process of this one: it is started, waited for, watched, and ended with it."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tasks.config.serving import ServeRun
from tasks.environment import API_KEY, api_key, without_prefect_login
from tasks.errors import WrongInput
from tasks.serve.request_log import check_tables
from tasks.storage import Storage
from tasks.system.home import rotate
from tasks.system.listening import listen

logger = logging.getLogger("lakevision.serve")

START_SECONDS = 300.0
"""Time limit of the start, which imports torch and loads the model."""

LOOK_SECONDS = 2.0
"""Interval of the checks of a running service."""

MAX_FAILED = 5
"""Checks without an answer after which a service counts as hung: a busy one answers, since its lanes are threads."""

TIMEOUT_SECONDS = 10.0

END_SECONDS = 30.0
"""Time for the rest of the log after the last answers, before a service is killed."""

ROOT = Path(__file__).resolve().parents[2]


class ServiceFailed(RuntimeError):
    """The process of a service ended, or does not answer."""


class Service(NamedTuple):
    """A running service.

    Attributes:
        url: Its address.
        process: Its supervisor.
        log: File with its output.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def answers(self, path: str) -> bool:
        """Return whether a path is answered with status 200."""
        with suppress(OSError), OPENER.open(f"{self.url}{path}", timeout=TIMEOUT_SECONDS):
            return True
        return False

    def check_alive(self) -> None:
        """Check that the process runs.

        Raises:
            ServiceFailed: It has ended.
        """
        if (code := self.process.poll()) is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            last = f", and its last line is: {lines[-1]}" if lines else ""
            raise ServiceFailed(f"the service ended with {code}; '{self.log}' has its output{last}")

    def wait(self, seconds: float | None) -> None:
        """Wait so many seconds, or until this process is interrupted, while the service answers.

        Raises:
            ServiceFailed: It ended, or does not answer any more.
        """
        until, failed = math.inf if seconds is None else time.monotonic() + seconds, 0
        while time.monotonic() < until:
            self.check_alive()
            rotate(self.log)
            failed = 0 if self.answers("/health") else failed + 1
            if failed >= MAX_FAILED:
                raise ServiceFailed(f"{self.url} has not answered {failed} times; '{self.log}' has its output")
            time.sleep(max(0.0, min(LOOK_SECONDS, until - time.monotonic())))


# Not through a proxy of the environment: the service is on this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def check_settings(run: ServeRun, storage: Storage) -> None:
    """Check what needs no registry.

    Raises:
        WrongInput: Other machines could use the service without a key, or its log cannot be written.
    """
    if not run.serve.is_local and api_key() is None:
        raise WrongInput(
            f"serve.host is '{run.serve.host}', which other machines can reach, and {API_KEY} is not set",
            setting="serve.host",
            way_out=f"set {API_KEY} to a long random text, or leave serve.host empty",
        )
    if run.serve.log_requests:
        check_tables(storage)


@contextmanager
def running_service(run: ServeRun, storage: Storage) -> Iterator[Service]:
    """Run a service for the block, which begins when it is ready.

    Args:
        run: Its parameters.
        storage: Its storage.

    Raises:
        WrongInput: The port is in use.
        ServiceFailed: It did not start.
    """
    given = run.model_copy(update={"storage": storage.as_config()})
    shown = "127.0.0.1" if run.serve.host in {"0.0.0.0", "::"} else run.serve.host  # noqa: S104  # compared only
    host = f"[{shown}]" if ":" in shown else shown
    log = storage.logs / f"serve-{run.serve.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    rotate(log)
    # Before the imports of the service, which take seconds.
    with listen(run.serve.port, "the service", "set serve.port to a free port", run.serve.host) as listening:
        command = [sys.executable, "-m", "tasks.serve.server", json.dumps(given.model_dump(exclude_defaults=True))]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*command, "--fd", str(listening.fileno()), "--parent", str(os.getpid())],
                cwd=ROOT,
                env=without_prefect_login(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[listening.fileno()],
                # In its own session: Ctrl-C reaches only this process, which ends the service in order.
                start_new_session=True,
            )
    service = Service(f"http://{host}:{run.serve.port}", process, log)
    try:
        until = time.monotonic() + START_SECONDS
        while not service.answers("/ready"):
            service.check_alive()
            if time.monotonic() > until:
                raise ServiceFailed(f"{service.url} is not ready after {START_SECONDS:.0f} s; see '{log}'")
            time.sleep(0.2)
        yield service
    finally:
        end(process, run.serve.request_seconds + END_SECONDS)


def end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End a service and its workers: in order, and after so many seconds whatever is left."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        logger.warning("the service did not end within %.0f s: it is killed", seconds)
    finally:
        with suppress(ProcessLookupError):  # All of them have ended.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
