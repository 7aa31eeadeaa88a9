"""Training runs whose ranks are killed or stopped, and readers of the results that they log."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import psutil

from tasks.config.train import TrainConfig
from tasks.errors import RankStalled
from tasks.launch.launcher import launch_ranks
from tasks.launch.restarts import RankFailed
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.tracking.server import prepare_tracking
from tasks.train.checkpoint_files import newest_position
from tasks.train.spec import TrainingSpec
from tests.builders.processes import ROOT

TRAIN = TrainConfig(
    recipe="given",
    model="shufflenet_v2_x0_5",
    weights="none",
    freeze_backbone=False,
    batch_size=4,
    max_epochs=6,
    patience=6,
    checkpoint_seconds=1,
    # Weights are compared exactly: the precision must not depend on the machine.
    precision="fp32",
)

ENDLESS = TRAIN.model_copy(update={"max_epochs": 9000, "patience": 9000})
"""A training run that is only killed."""


LAUNCHER = """
import sys
from pathlib import Path
from tasks.launch.launcher import launch_ranks
from tasks.train.spec import TrainingSpec
launch_ranks(TrainingSpec.model_validate_json(Path(sys.argv[1]).read_text()))
"""
"""A program that launches the training run of a file."""


def start_launcher(spec: TrainingSpec, path: Path) -> "subprocess.Popen[str]":
    """Launch a training run in a process of its own; its specification is written to `path`."""
    path.write_text(spec.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def own_ranks() -> list[psutil.Process]:
    """Return the ranks that this process started and that are still running."""
    found = []
    for child in psutil.Process().children():
        try:
            if "tasks.launch.start_rank" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue  # The process ended meanwhile.
    return found


def rank_of(process: psutil.Process) -> int:
    """Return the number of the rank of a process, of either backend; a single process is rank 0."""
    variables = process.environ()
    return int(variables.get("HOROVOD_RANK") or variables.get("RANK") or 0)


def pids_of_ranks() -> dict[int, int]:
    """Return the process ids of the ranks of either backend that this process started, by the number of the rank."""
    found = {}
    for process in own_ranks():
        with suppress(psutil.Error):  # The process ended meanwhile.
            found[rank_of(process)] = process.pid
    return found


@dataclass
class Victim:
    """A rank that got a signal, and the end of its training run."""

    rank: int | None = None
    """Number of the rank; None where the training run ended before the signal."""
    message: str = ""
    """First line of the error."""
    seconds: float = 0.0
    """Seconds from the signal to the end of all ranks."""
    run: RunRef | None = None
    """The MLflow run, if the training run has ended well after all."""


def launch_and_kill(
    spec: TrainingSpec,
    draw: random.Random,
    seconds: float | None = None,
    *,
    number: signal.Signals = signal.SIGKILL,
    rank: int | None = None,
    find: Callable[[], dict[int, int]] = pids_of_ranks,
) -> Victim:
    """Train, and kill or stop a rank in a step, a checkpoint or a validation.

    Args:
        spec: The training run to launch.
        draw: Chooses the moment and the rank.
        seconds: The time from the start to the signal. By default the signal follows the second or third epoch of this
            launch, within the duration of that epoch: this is in time even where a machine's speed varies.
        number: The signal.
        rank: Number of the rank; None for any.
        find: Returns the process ids to choose from, by the number of the rank.
    """
    started, over = threading.Event(), threading.Event()
    events: list[float] = []
    victim, sent_at = Victim(), [time.monotonic()]
    wanted, fraction = draw.choice((2, 3)), draw.random()
    if seconds is not None:
        started.set()

    def wait_and_kill() -> None:
        started.wait()
        wait = fraction * (events[-1] - events[-2]) if seconds is None else seconds
        if not over.wait(wait) and (numbered := find()):
            victim.rank = draw.choice(sorted(numbered)) if rank is None else rank
            sent_at[0] = time.monotonic()
            os.kill(numbered[victim.rank], number)

    def on_event(_event: dict[str, Any]) -> None:
        if len(events) < wanted:
            events.append(time.monotonic())
        if len(events) == wanted:
            started.set()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    try:
        victim.run = launch_ranks(spec, on_event)
    except (RankFailed, RankStalled) as failed:
        victim.seconds = time.monotonic() - sent_at[0]
        victim.message = str(failed).splitlines()[0]
        moment = f"{fraction:.2f} of an epoch after epoch {wanted}" if seconds is None else f"after {seconds:.2f} s"
        print(f"{number.name} {moment}, the end after {victim.seconds:.1f} s: {victim.message}")
    finally:
        over.set()
        started.set()
        thread.join()
    return victim


@contextmanager
def killed_at_checkpoints(
    spec: TrainingSpec, ranks: Sequence[int], *, within_epoch: bool = False
) -> Iterator[list[tuple[int, int]]]:
    """Kill a rank at each of the next new checkpoints, while the block trains.

    Args:
        spec: The training run.
        ranks: Numbers of the ranks to kill, one after the other.
        within_epoch: Whether only checkpoints within an epoch count.

    Yields:
        A list, to which epoch and image of the newest checkpoint are appended before each kill.
    """
    over, kills, ended = threading.Event(), list[tuple[int, int]](), set[int]()
    folder = spec.storage.checkpoints / spec.key

    def wait_and_kill() -> None:
        for rank in ranks:
            while not over.wait(0.02):
                found = newest_position(folder)
                if found is None or found in kills or (within_epoch and found[1] == 0):
                    continue
                own = pids_of_ranks()
                # The ranks of an earlier kill are about to end.
                if rank in own and own[rank] not in ended:
                    kills.append(found)
                    ended.update(own.values())
                    os.kill(own[rank], signal.SIGKILL)
                    break

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


def logged_epochs(run: RunRef, storage: Storage) -> list[int]:
    """Return the epochs of the validation losses that the run logged."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    return [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")]


def runs_in(storage: Storage) -> list[tuple[str, str]]:
    """Return id and status of every MLflow run of the training experiment."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    return [(run.info.run_id, run.info.status) for run in client.search_runs([prepare_tracking(storage)])]


def has_no_running(storage: Storage) -> bool:
    """Return whether no MLflow run of the training experiment is still running."""
    return "RUNNING" not in [status for _run_id, status in runs_in(storage)]


def runs_beside(run: RunRef, storage: Storage) -> list[tuple[str, str]]:
    """Return id and status of every MLflow run of the run's experiment, itself included."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    found = client.search_runs([client.get_run(run.run_id).info.experiment_id])
    return [(one.info.run_id, one.info.status) for one in found]
