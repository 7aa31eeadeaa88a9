"""Distributed training runs on a real server and worker, their processes, and their cancellation."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from uuid import UUID

import psutil
from prefect.client.schemas.objects import FlowRun
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from deployments.stack.processes import LocalStack
from tasks.config.distributed import TrainDistributedRun
from tasks.system.listening import free_port
from tasks.train.spec import TrainingSpec
from tests.builders.chromium import WAIT_SECONDS
from tests.builders.leftovers import is_alive, ports_of
from tests.builders.processes import rank_processes
from tests.builders.submissions import client_of, start_worker

BUTTON = "//*[self::button or @role='button'][normalize-space()='{text}']"


@contextmanager
def training_stack(home: Path) -> Iterator[tuple[LocalStack, "Popen[bytes]"]]:
    """Run a server with all deployments, and a worker of the pool `gpu`."""
    running = LocalStack(home, free_port())
    running.start_server()
    try:
        running.start("register", [sys.executable, "-m", "deployments.stack.register"])
        running.finish("register")
        yield running, start_worker(running)
    finally:
        running.end()


def submit_training(stack: LocalStack, spec: TrainingSpec) -> FlowRun:
    """Submit a run of the deployment `train-distributed`, as a user or the DAG does."""
    assert spec.distributed is not None
    config = TrainDistributedRun(storage=spec.storage.as_config(), train=spec.train, distributed=spec.distributed)
    with client_of(stack) as client:
        deployment = client.read_deployment_by_name("train-distributed/train-distributed")
        parameters = {"config": config.model_dump(), "cache_ref": spec.cache.model_dump()}
        return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def state_type(stack: LocalStack, run: UUID) -> str:
    """Return the type of the state of a run."""
    with client_of(stack) as client:
        state = client.read_flow_run(run).state
    assert state is not None
    return state.type.value


def is_final(stack: LocalStack, run: UUID) -> bool:
    """Return whether a run has ended."""
    return state_type(stack, run) in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def open_run(page: webdriver.Chrome, stack: LocalStack, run: UUID) -> None:
    """Open the page of a run in a browser that is logged in, and wait for its button to cancel."""
    page.get(f"{stack.url}/runs/flow-run/{run}")
    WebDriverWait(page, WAIT_SECONDS).until(lambda shown: shown.find_element(By.XPATH, BUTTON.format(text="Cancel")))


def click_cancel(page: webdriver.Chrome) -> None:
    """Cancel the run whose page is open, and return when the server has confirmed it."""
    wait = WebDriverWait(page, WAIT_SECONDS)
    page.find_element(By.XPATH, BUTTON.format(text="Cancel")).click()
    wait.until(lambda shown: shown.find_element(By.XPATH, BUTTON.format(text="Confirm"))).click()
    wait.until(lambda shown: not shown.find_elements(By.XPATH, BUTTON.format(text="Confirm")))


class Watched:
    """The processes that a worker starts while this watches: flow run, launcher and ranks."""

    def __init__(self, worker: int, home: str) -> None:
        """Start the thread that looks for them.

        Args:
            worker: Process id of the worker.
            home: Home folder of the training runs.
        """
        self._worker = psutil.Process(worker)
        self._home = home
        self._found: set[psutil.Process] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            with suppress(psutil.Error):
                self._found.update(self._worker.children(recursive=True))

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def ranks(self) -> list[psutil.Process]:
        """Return the running ranks."""
        with suppress(psutil.Error):
            return rank_processes(self._home, self._worker.children(recursive=True))
        return []

    def has_ranks(self) -> bool:
        """Return whether both ranks of a run have started."""
        return len(self.ranks()) == 2

    def alive(self) -> list[str]:
        """Return the command lines of those that still run, and of ranks that were orphaned.

        The process in which Prefect's worker looks for hooks of the flow, after the run has ended, is not among them.
        """
        found = [process for process in set(self._found) if is_alive(process)]
        lines = []
        # The search for orphans reads the command lines of all processes: only when no other is left.
        for process in found or rank_processes(self._home):
            with suppress(psutil.Error):
                if "hook" not in (command := process.cmdline()):
                    lines.append(f"{process.pid} {' '.join(command)}")
        return lines

    def are_gone(self) -> bool:
        """Return whether none of them is alive."""
        return self.alive() == []

    def ports(self) -> set[int]:
        """Return the ports on which they listen."""
        return ports_of(set(self._found))


def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    """Wait until a condition holds, at most for `limit` seconds; return the seconds."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < limit:
        time.sleep(0.1)
    return time.monotonic() - began
