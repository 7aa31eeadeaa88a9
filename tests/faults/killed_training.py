"""Trainings whose ranks are killed, and what they must end with."""

import os
import random
import signal
import threading
from pathlib import Path

import mlflow
import psutil
import torch

from tasks.config import TrainConfig
from tasks.distributed.launch import RankFailed, launch_ranks
from tasks.distributed.rank import RankSpec
from tasks.refs import RunRef
from tasks.storage import Storage
from tests.integration.trainings import weights

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
            if "tasks.distributed.start_rank" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue  # It ended while it was looked at.
    return found


def launch_and_kill(spec: RankSpec, seconds: float, draw: random.Random, *, after_an_epoch: bool = False) -> str:
    """Train, and kill a rank so long after the start, or the first epoch, without a chance to say anything.

    Returns:
        What was said of the rank; nothing where the training had ended before.
    """
    begun, over = threading.Event(), threading.Event()
    if not after_an_epoch:
        begun.set()

    def wait_and_kill() -> None:
        begun.wait()
        if not over.wait(seconds) and (ranks := own_ranks()):
            os.kill(draw.choice(ranks).pid, signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    try:
        launch_ranks(spec, lambda _event: begun.set())
    except RankFailed as failed:
        said = str(failed).splitlines()[0]
        print(f"killed {seconds:.2f} s after the {'first epoch' if after_an_epoch else 'start'}: {said}")
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
