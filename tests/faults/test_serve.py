"""Services whose processes are killed at random moments, while clients ask and the alias moves."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tasks.config.storage import StorageConfig
from tasks.schema import REQUESTS_ARROW, columns_of
from tasks.serve.request_log import rows_of
from tasks.serve.service import Service
from tasks.storage import Storage, resolve_storage
from tasks.tracking import models
from tasks.tracking.server import prepare_tracking
from tests.builders.services import NAME, Clients, asking, picture, register, service, until, workers
from tests.faults.conftest import at_most

ROUNDS = at_most(20)

LOST_SECONDS = 1.5
"""Age of an answer that SIGKILL must not lose: four times that of the README, for a busy machine."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """Return a home with two versions of the model; the first is the champion."""
    folder = tmp_path_factory.mktemp("serve")
    storage = resolve_storage(StorageConfig(home=str(folder / "home")))
    prepare_tracking(storage)
    register(storage, folder, 1, "champion")
    register(storage, folder, 2)
    return storage


def logged(home: Storage) -> Counter[str]:
    """Return how often each request is in the table."""
    return Counter(rows_of(home, "requests", columns_of(REQUESTS_ARROW, "request_id"))["request_id"].to_pylist())


def check_logged(home: Storage, clients: Clients, killed: list[float]) -> None:
    """Check that each answer has one row, except for those that came a moment before a kill."""
    with service(home):
        pass  # It moves the rows that the killed one has left.
    rows = logged(home)
    assert max(rows.values()) == 1
    lost = [times for name, times in clients.ids.items() if name not in rows]
    # A client may read an answer after the kill, but not send its request then.
    late = [at for sent, at in lost if not any(sent < kill < at + LOST_SECONDS for kill in killed)]
    assert late == [], killed


def kill_a_worker(running: Service, draw: random.Random) -> float:
    """Kill a worker at a random moment, and return the time."""
    time.sleep(draw.uniform(0, 1.5))
    victim = draw.choice(workers(running))
    victim.kill()
    return time.monotonic()


@pytest.mark.timeout(3600)
def test_killed_workers_are_replaced_during_reloads(home: Storage, draw: random.Random) -> None:
    """The service answers on, all workers have the version of the alias, and the log has every older answer once."""
    first, second = (models.numbered_version(home, NAME, str(number)) for number in (1, 2))
    assert first is not None
    assert second is not None
    killed = []
    with service(home, num_workers=2) as running, asking(running.url, picture()) as clients:
        for number in range(ROUNDS):
            wanted = (second, first)[number % 2]
            models.set_alias(home, wanted, "champion")
            killed.append(kill_a_worker(running, draw))
            until(lambda: len(workers(running)) == 2)
            clients.wait_for(wanted.version)
        models.set_alias(home, first, "champion")
    check_logged(home, clients, killed)

    # A client loses at most the request that the killed worker had.
    assert len(clients.failures) <= 4 * ROUNDS
    assert len(clients.answers) > 20 * ROUNDS


@pytest.mark.timeout(3600)
def test_a_killed_service_loses_no_older_answer(home: Storage, draw: random.Random) -> None:
    """At once, or while it ends in order and moves its log; no process is left, and no row is there twice."""
    for number in range(ROUNDS):
        with service(home, num_workers=1 + number % 2) as running, asking(running.url, picture()) as clients:
            until(lambda clients=clients: len(clients.answers) > 20)
            own = [running.process.pid, *(worker.pid for worker in workers(running))]
            time.sleep(draw.uniform(0, 1))
            if number % 3:
                running.process.terminate()
                time.sleep(draw.uniform(0, 1.5))
            killed = [time.monotonic()]
            for process in own[:1] if number % 2 else own:
                if psutil.pid_exists(process):
                    os.kill(process, signal.SIGKILL)
            clients.is_over.set()
            running.process.wait(60)
            until(lambda own=own: not any(psutil.pid_exists(pid) for pid in own))
        check_logged(home, clients, killed)
    assert not list(Path(home.tables).glob("**/*.tmp"))
