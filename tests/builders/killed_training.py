"""Training runs whose ranks are killed, and readers of the results that they log."""

import os
import random
import signal
import threading
import time
from typing import Any

import mlflow
import psutil

from tasks.config.train import TrainConfig
from tasks.launch.launcher import RankFailed, launch_ranks
from tasks.refs import RunRef
from tasks.storage import Storage
from tasks.train.spec import TrainingSpec

TRAIN = TrainConfig(
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


def launch_and_kill(spec: TrainingSpec, draw: random.Random, seconds: float | None = None) -> str:
    """Train, and kill a rank with SIGKILL in a step, a checkpoint or a validation.

    Args:
        spec: The training run to launch.
        draw: Chooses the moment and the rank.
        seconds: The time from the start to the kill. By default the kill follows the second or third epoch of this
            launch, within the duration of that epoch: this is in time even where a machine's speed varies.

    Returns:
        The first line of the error, empty where the training run ended before the kill.
    """
    started, over = threading.Event(), threading.Event()
    events: list[float] = []
    wanted, fraction = draw.choice((2, 3)), draw.random()
    if seconds is not None:
        started.set()

    def wait_and_kill() -> None:
        started.wait()
        wait = fraction * (events[-1] - events[-2]) if seconds is None else seconds
        if not over.wait(wait) and (ranks := own_ranks()):
            os.kill(draw.choice(ranks).pid, signal.SIGKILL)

    def on_event(_event: dict[str, Any]) -> None:
        if len(events) < wanted:
            events.append(time.monotonic())
        if len(events) == wanted:
            started.set()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    try:
        launch_ranks(spec, on_event)
    except RankFailed as failed:
        message = str(failed).splitlines()[0]
        moment = f"{fraction:.2f} of an epoch after epoch {wanted}" if seconds is None else f"after {seconds:.2f} s"
        print(f"killed {moment}: {message}")
        return message
    finally:
        over.set()
        started.set()
        thread.join()
    return ""


def logged_epochs(run: RunRef, storage: Storage) -> list[int]:
    """Return the epochs of the validation losses that the run logged."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    return [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")]


def runs_beside(run: RunRef, storage: Storage) -> list[tuple[str, str]]:
    """Return id and status of every MLflow run of the run's experiment, itself included."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    found = client.search_runs([client.get_run(run.run_id).info.experiment_id])
    return [(one.info.run_id, one.info.status) for one in found]
