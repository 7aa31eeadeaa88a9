"""Distributed training on the work pool that is cancelled, or whose server or worker is gone."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import torch
from prefect.states import Cancelling

from deployments.stack.processes import LocalStack
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.launch.launcher import launch_ranks
from tasks.refs import CacheRef
from tasks.storage import Storage, resolve_storage
from tasks.tracking.runs import find_finished_run
from tasks.train.checkpoint_files import newest_position
from tasks.train.spec import TrainingSpec
from tests.builders.chromium import chromium, log_in
from tests.builders.hand_made_cache import hand_made_cache
from tests.builders.killed_training import ENDLESS, TRAIN, has_no_running, logged_epochs, runs_beside, runs_in
from tests.builders.leftovers import LIMIT_SECONDS, Leftovers, listening, shared_memory
from tests.builders.submissions import (
    client_of,
    end_worker,
    kill_server,
    prefect_command,
    restart_server,
    start_worker,
    wait_until,
)
from tests.builders.submitted_training import (
    Watched,
    click_cancel,
    is_final,
    open_run,
    seconds_until,
    state_type,
    submit_training,
    training_stack,
)
from tests.builders.training_runs import weights
from tests.conftest import write_images
from tests.faults.conftest import at_most

NUM_CANCELS, NUM_OUTAGES, NUM_LONG_OUTAGES, NUM_LOSSES = map(at_most, (7, 17, 3, 7))
"""Rounds of each test. A round starts a flow run, a launcher and ranks, which takes up to half a minute."""

LONGEST_RETRIES = 75.0
"""Prefect's clients repeat a request for about a minute."""

TRAIN_LONG = TRAIN.model_copy(update={"max_epochs": 120, "patience": 120})
TWO_RANKS = DistributedConfig(num_ranks=2)


@dataclass(frozen=True)
class Running:
    """A server, the process of its worker, and a training run with the weights that it must have."""

    stack: LocalStack
    worker: int
    cache: CacheRef
    expected: dict[str, torch.Tensor]

    def spec(self, storage: Storage, train: TrainConfig = TRAIN_LONG) -> TrainingSpec:
        """Return the training run in a home of its own."""
        return TrainingSpec(train=train, distributed=TWO_RANKS, cache=self.cache, storage=storage)


def assert_completed(running: Running, run: UUID, storage: Storage, folder: Path) -> None:
    """Wait for the end of a run: it has the undisturbed weights, each epoch once, and no other run is left."""
    wait_until(partial(is_final, running.stack, run))
    assert state_type(running.stack, run) == "COMPLETED"
    trained = find_finished_run(storage, running.spec(storage).key)
    assert trained is not None
    found = weights(trained, storage, folder)
    assert all(torch.equal(found[name], running.expected[name]) for name in running.expected)
    assert logged_epochs(trained, storage) == list(range(TRAIN_LONG.max_epochs))
    assert runs_beside(trained, storage) == [(trained.run_id, "FINISHED")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a server with a worker, and an undisturbed training run."""
    folder = tmp_path_factory.mktemp("distributed")
    write_images(folder / "source", 20)
    cache = hand_made_cache(folder / "source", f"{folder}/cache")
    other = resolve_storage(StorageConfig(home=f"{folder}/other"))
    undisturbed = launch_ranks(TrainingSpec(train=TRAIN_LONG, distributed=TWO_RANKS, cache=cache, storage=other))
    expected = weights(undisturbed, other, folder)
    with training_stack(folder / "stack") as (stack, worker):
        yield Running(stack, worker.pid, cache, expected)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("by", ["api", "cli", "ui"])
def test_cancelled_run_leaves_nothing_and_is_completed_by_the_next(
    running: Running, storage: Storage, tmp_path: Path, draw, by: str
) -> None:
    """At whatever moment: before its process, while flow or ranks start, in training; states are true."""
    stack, spec = running.stack, running.spec(storage)
    assert runs_in(storage) == []
    files = shared_memory()
    with ExitStack() as opened:
        page = opened.enter_context(chromium()) if by == "ui" else None
        if page is not None:
            page.get(f"{stack.url}/login")
            log_in(page, stack.auth_string)
            wait_until(lambda: not page.current_url.endswith("/login"))

        def cancel(run: UUID) -> None:
            if page is not None:
                click_cancel(page)
            elif by == "cli":
                command = prefect_command("flow-run", "cancel", str(run))
                subprocess.run(command, env=stack.environment, check=True, capture_output=True, timeout=120)
            else:
                with client_of(stack) as client:
                    client.set_flow_run_state(run, Cancelling())

        for number in range(NUM_CANCELS):
            watched = Watched(running.worker, storage.home)
            run = submit_training(stack, spec).id
            if page is not None:
                open_run(page, stack, run)
            trains = number % 2 == 1
            if trains:
                wait_until(watched.has_ranks)
            seconds = draw.uniform(0, 15)
            time.sleep(seconds)
            state, ports = state_type(stack, run), watched.ports()
            cancel(run)
            # A process may still be started after the cancellation: not before the run is final are all known. The
            # state of a run that is cancelled before its flow begins waits for the worker's look for the flow's hooks.
            ended = seconds_until(partial(is_final, stack, run), LIMIT_SECONDS)
            gone = ended + seconds_until(watched.are_gone, LIMIT_SECONDS - ended)
            alive = watched.alive()
            wait_until(partial(is_final, stack, run))
            moment = "of its ranks" if trains else "of the submission"
            print(f"round {number}: {seconds:.1f} s after the start {moment}, {state}: {ended:.1f} and {gone:.1f} s")
            assert alive == []
            assert watched.are_gone()
            watched.end()
            assert state_type(stack, run) == "CANCELLED"
            assert listening(ports) == set()
            assert shared_memory() <= files
            assert has_no_running(storage)
    assert_completed(running, submit_training(stack, spec).id, storage, tmp_path)


@pytest.mark.timeout(3600)
def test_run_that_is_cancelled_after_an_outage_leaves_nothing(running: Running, storage: Storage, draw) -> None:
    """After an outage of the server, its worker looks for cancellations seldom, and in the end never."""
    stack, spec = running.stack, running.spec(storage, ENDLESS)
    assert runs_in(storage) == []
    for number in range(NUM_CANCELS):
        left, watched = Leftovers(), Watched(running.worker, storage.home)
        run = submit_training(stack, spec).id
        wait_until(watched.has_ranks)
        time.sleep(draw.uniform(0, 5))
        kill_server(stack)
        seconds = draw.uniform(5, LONGEST_RETRIES)
        time.sleep(seconds)
        restart_server(stack)
        time.sleep(draw.uniform(0, 5))
        assert watched.has_ranks()
        left.note(psutil.Process(running.worker).children(recursive=True))
        with client_of(stack) as client:
            client.set_flow_run_state(run, Cancelling())
        gone = left.assert_none(time.monotonic())
        watched.end()
        print(f"round {number}: gone {gone:.1f} s after the cancellation, which followed an outage of {seconds:.1f} s")
        wait_until(partial(is_final, stack, run))
        assert state_type(stack, run) == "CANCELLED"
        assert has_no_running(storage)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rounds", "outage"),
    [(NUM_OUTAGES, (2.0, 30.0)), (NUM_LONG_OUTAGES, (LONGEST_RETRIES, LONGEST_RETRIES + 15))],
)
def test_training_goes_on_without_the_server(
    running: Running, tmp_path: Path, draw, rounds: int, outage: tuple[float, float]
) -> None:
    """The server is killed and started again in training: the run completes as if nothing had happened."""
    stack = running.stack
    for number in range(rounds):
        storage = resolve_storage(StorageConfig(home=f"{tmp_path}/home-{number}"))
        spec = running.spec(storage)
        folder = storage.checkpoints / spec.key
        assert runs_in(storage) == []
        run = submit_training(stack, spec).id
        wait_until(partial(newest_position, folder))
        time.sleep(draw.uniform(0, 5))
        kill_server(stack)
        before, seconds = newest_position(folder), draw.uniform(*outage)
        time.sleep(seconds)
        after = newest_position(folder)
        restart_server(stack)
        print(f"round {number}: an outage of {seconds:.1f} s, in which training went from {before} to {after}")
        # The checkpoints of a run that has completed are removed.
        assert before != after
        assert_completed(running, run, storage, tmp_path)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("killed", ["worker", "flow", "machine"])
def test_killed_worker_loses_no_run_and_leaves_none_running(
    running: Running, tmp_path: Path, draw, killed: str
) -> None:
    """A run ends with its worker, its own process, or both and the ranks: none is left, and the next completes it."""
    with training_stack(tmp_path / "stack") as (stack, first):
        end_worker(stack, first)
        worker = start_worker(stack, ends_lost_runs=True)
        for number in range(NUM_LOSSES):
            storage = resolve_storage(StorageConfig(home=f"{tmp_path}/home-{number}"))
            here = replace(running, stack=stack, worker=worker.pid)
            spec = here.spec(storage)
            assert runs_in(storage) == []
            left = Leftovers()
            run = submit_training(stack, spec).id
            seconds = draw.uniform(0, 25)
            time.sleep(seconds)
            before, own = state_type(stack, run), psutil.Process(worker.pid)
            children = own.children(recursive=True)
            victims = {"worker": [own], "flow": own.children(), "machine": [own, *children]}
            left.note(children)
            killed_at = time.monotonic()
            for process in victims[killed]:
                process.kill()
            if killed != "flow":
                end_worker(stack, worker)
            left.assert_none(killed_at, processes_here=False)
            if killed == "flow":
                wait_until(partial(is_final, stack, run))  # as its worker reports it
                end_worker(stack, worker)
            worker = start_worker(stack, ends_lost_runs=True)
            wait_until(partial(is_final, stack, run))
            after = state_type(stack, run)
            print(f"round {number}: {seconds:.1f} s after the submission, {before}; then {after}")
            assert after in {"COMPLETED", "CRASHED"}
            # The worker comes to MLflow's runs after Prefect's.
            wait_until(partial(has_no_running, storage))
            if after == "CRASHED":
                run = submit_training(stack, spec).id
            assert_completed(here, run, storage, tmp_path)
