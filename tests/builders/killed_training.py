"""Trainings whose ranks are killed, and what they must end with."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import mlflow
import psutil
import torch

from tasks.config.train import TrainConfig
from tasks.launch.launcher import RankFailed, launch_ranks
from tasks.launch.spec import RankSpec
from tasks.refs import RunRef
from tasks.storage import Storage
from tests.builders.training_runs import weights

TRAIN = TrainConfig(
    model="shufflenet_v2_x0_5",
    weights="none",
    freeze_backbone=False,
    batch_size=4,
    max_epochs=6,
    patience=6,
    checkpoint_seconds=1,
    # Two rounds of killing must not meet another number format on another machine.
    precision="fp32",
)


def own_ranks() -> list[psutil.Process]:
    """Return the ranks that this process started and that still run."""
    found = []
    for child in psutil.Process().children():
        try:
            if "tasks.launch.start_rank" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue  # It ended while it was looked at.
    return found


def launch_and_kill(spec: RankSpec, draw: random.Random, seconds: float | None = None) -> str:
    """Train, and kill a rank without a chance to say anything: in a step, a checkpoint or a validation.

    Args:
        spec: What to train.
        draw: Chooses the moment and the rank.
        seconds: After the start; by default it is after the second or third epoch of this launch, for at most as long
            as that epoch took, so that machines that are faster or slower from one minute to the next kill in time.

    Returns:
        What was said of the rank; nothing where the training had ended before.
    """
    begun, over = threading.Event(), threading.Event()
    events: list[float] = []
    wanted, fraction = draw.choice((2, 3)), draw.random()
    if seconds is not None:
        begun.set()

    def wait_and_kill() -> None:
        begun.wait()
        wait = fraction * (events[-1] - events[-2]) if seconds is None else seconds
        if not over.wait(wait) and (ranks := own_ranks()):
            os.kill(draw.choice(ranks).pid, signal.SIGKILL)

    def on_event(_event: dict[str, Any]) -> None:
        if len(events) < wanted:
            events.append(time.monotonic())
        if len(events) == wanted:
            begun.set()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    try:
        launch_ranks(spec, on_event)
    except RankFailed as failed:
        said = str(failed).splitlines()[0]
        moment = f"{fraction:.2f} of an epoch after epoch {wanted}" if seconds is None else f"after {seconds:.2f} s"
        print(f"killed {moment}: {said}")
        return said
    finally:
        over.set()
        begun.set()
        thread.join()
    return ""


def check_made_good(run: RunRef, storage: Storage, undisturbed: RunRef, other: Storage, folder: Path) -> None:
    """The same weights, one MLflow run with metrics, every epoch once, no checkpoint and no rank left."""
    ours, theirs = weights(run, storage, folder), weights(undisturbed, other, folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    epochs = list(range(TRAIN.max_epochs))
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == epochs
    runs = client.search_runs([client.get_run(run.run_id).info.experiment_id])
    assert [(found.info.run_id, found.info.status) for found in runs] == [(run.run_id, "FINISHED")]
    assert not list(storage.checkpoints.glob("*/*.pt"))
    assert own_ranks() == []
