"""Training runs in this process that are interrupted at chosen steps, compared with uninterrupted ones."""

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import mlflow
import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import load_file

from tasks.collectives.reducer import Reducer
from tasks.config.cache import CacheConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.metrics.evaluate import EpochMetrics
from tasks.refs import TEST, TRAIN, VAL, CacheRef, RunRef
from tasks.storage import Storage, resolve_storage
from tasks.system.signals import interrupt_on
from tasks.tracking.runs import run_metrics
from tasks.tracking.trained import download_weights
from tasks.train.checkpoint import Checkpoints
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec, run_key
from tests.builders.caches import write_cache
from tests.fakes.small_training import TIMINGS, Killed, same_tensors

MODEL, SIDE = "shufflenet_v2_x0_5", 32
ROWS = {TRAIN: 45, VAL: 9, TEST: 9}
BATCH, STEPS = 6, 8
"""Images per step, and steps per epoch."""

SETTINGS = {
    "model": MODEL,
    "batch_size": BATCH,
    "patience": 9,
    "monitor": "val_loss",
    "num_threads": 1,
    # No periodic checkpoint within an epoch, only on SIGTERM.
    "checkpoint_seconds": 86_400,
}


@dataclass(frozen=True)
class Interruption:
    """An interruption of a training run, and the checkpoint that it leaves.

    Attributes:
        how: "killed" loses all steps after the newest checkpoint. "terminated" is SIGTERM in the last step.
            "terminated in validation" is SIGTERM in the validation after the last step of an epoch.
        steps: Steps between start and interruption.
        leaves: Position of the newest checkpoint: phase, epoch, images of the epoch.
        repeated: Number of steps that are repeated after the resume.
    """

    how: Literal["killed", "terminated", "terminated in validation"]
    steps: int
    leaves: tuple[int, int, int]
    repeated: int = 0


@dataclass
class CountingRank(Reducer):
    """A single process that counts its steps and may be interrupted."""

    interruption: Interruption | None = None
    after_step: Callable[[], None] = lambda: None
    after_sum: Callable[[], None] = lambda: None
    steps: int = 0
    epochs: list[int] = field(default_factory=list)
    """Numbers of the reported epochs."""
    _sums: int = 0

    def step(self, take_step: Callable[[], None]) -> None:
        """Take the step, and raise the interruption after the last one."""
        super().step(take_step)
        self.steps += 1
        self.after_step()
        if self.interruption is None or self.steps != self.interruption.steps:
            return
        if self.interruption.how == "killed":
            raise Killed
        if self.interruption.how == "terminated":
            signal.raise_signal(signal.SIGTERM)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values; raise the interruption in the second sum of an epoch, that of its validation."""
        self.after_sum()
        planned = self.interruption
        if planned is not None and planned.how == "terminated in validation" and self.steps == planned.steps:
            self._sums += 1
            if self._sums == 2:
                signal.raise_signal(signal.SIGTERM)
        return values

    def on_epoch(self, metrics: EpochMetrics) -> None:
        """Record an epoch."""
        self.epochs.append(metrics.epoch)


@dataclass(frozen=True)
class Workspace:
    """A cache, pretrained weights, and two storages: for uninterrupted and for interrupted training runs."""

    cache: CacheRef
    weights: Path
    uninterrupted: Storage
    interrupted: Storage

    def settings(self, **changes: object) -> TrainConfig:
        """Return training settings with a frozen backbone, except for the changes."""
        return TrainConfig.model_validate({"recipe": "given"} | SETTINGS | {"weights": str(self.weights)} | changes)


def coloured_cache(
    url: str, classes: Sequence[str] = ("blue", "green", "red"), rows: Mapping[str, int] = ROWS
) -> CacheRef:
    """Write a cache of noise with a colour channel per class, for at most three classes."""

    def draw(split: str, row: int) -> tuple[np.ndarray, int]:  # type: ignore[type-arg]  # pixels, uint8 HWC
        pixels = np.random.default_rng((len(split), row)).integers(0, 150, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[..., row % len(classes)] += 100
        return pixels, row % len(classes)

    return write_cache(url, rows, draw, classes, CacheConfig(image_size=SIDE), rows_per_group=3, groups_per_file=5)


def _write_weights(path: Path) -> None:
    """Write random weights with batch norm statistics, as a substitute for pretrained weights."""
    torch.manual_seed(11)
    network = torchvision.models.get_model(MODEL, weights=None)
    with torch.no_grad():
        for _ in range(30):
            network(torch.randn(16, 3, SIDE, SIDE))
    torch.save(network.state_dict(), path)


def make_workspace(folder: Path, tracking_database: Path) -> Workspace:
    """Create a workspace; both homes get a copy of the tracking database and share one folder of caches."""
    storages = []
    for name in ("uninterrupted", "interrupted"):
        (folder / name).mkdir()
        shutil.copy(tracking_database, folder / name)
        storages.append(resolve_storage(StorageConfig(home=str(folder / name), cache=f"{folder}/caches")))
    _write_weights(folder / "weights.pt")
    return Workspace(coloured_cache(f"{folder}/caches/coloured"), folder / "weights.pt", *storages)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Handle SIGTERM as a rank does."""
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM, once=True)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def checkpoint_position(storage: Storage, train: TrainConfig, cache: CacheRef) -> tuple[int, int, int]:
    """Return the position of the newest checkpoint: phase, epoch, images of the epoch."""
    checkpoints = Checkpoints(storage.checkpoints / run_key(train, cache, None), keep=2, config={})
    name, _content = checkpoints.newest()
    assert name is not None
    content = checkpoints.load(name)
    return content["phase"], content["next_epoch"], content["running"]["position"]


def train_with_interruptions(
    workspace: Workspace,
    train: TrainConfig,
    interruptions: Sequence[Interruption],
    make_rank: Callable[[Interruption | None], CountingRank] = CountingRank,
) -> tuple[RunRef, int, list[int]]:
    """Train with a sequence of interruptions, and check the checkpoint that each leaves.

    Returns:
        The MLflow run, the number of steps without repeated ones, and the reported epochs.
    """
    steps, epochs = 0, list[int]()
    for interruption in interruptions:
        rank = make_rank(interruption)
        with sigterm_interrupts(), pytest.raises(Killed if interruption.how == "killed" else KeyboardInterrupt):
            train_model(
                TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted),
                reducer=rank,
                on_epoch=rank.on_epoch,
            )
        assert checkpoint_position(workspace.interrupted, train, workspace.cache) == interruption.leaves
        assert rank.steps == interruption.steps
        steps, epochs = steps + rank.steps - interruption.repeated, epochs + rank.epochs
    rank = make_rank(None)
    run = train_model(
        TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted),
        reducer=rank,
        on_epoch=rank.on_epoch,
    )
    return run, steps + rank.steps, epochs + rank.epochs


def check_resumed(
    workspace: Workspace,
    train: TrainConfig,
    interruptions: Sequence[Interruption],
    folder: Path,
    make_rank: Callable[[Interruption | None], CountingRank] = CountingRank,
) -> tuple[RunRef, CountingRank]:
    """Check that interrupted training equals uninterrupted training.

    Weights and metrics are bit-identical, and no step or epoch counts twice.

    Returns:
        The uninterrupted run, and the rank that trained it.
    """
    uninterrupted_rank = make_rank(None)
    uninterrupted = train_model(
        TrainingSpec(train=train, cache=workspace.cache, storage=workspace.uninterrupted),
        reducer=uninterrupted_rank,
        on_epoch=uninterrupted_rank.on_epoch,
    )
    run, steps, epochs = train_with_interruptions(workspace, train, interruptions, make_rank)

    assert (steps, epochs) == (uninterrupted_rank.steps, uninterrupted_rank.epochs)
    ours = logged_weights(workspace.interrupted, run, folder)
    assert same_tensors(ours, logged_weights(workspace.uninterrupted, uninterrupted, folder))
    assert logged_metrics(workspace.interrupted, run) == logged_metrics(workspace.uninterrupted, uninterrupted)
    client = mlflow.MlflowClient(tracking_uri=workspace.interrupted.tracking)
    experiment, key = client.get_run(run.run_id).info.experiment_id, run_key(train, workspace.cache, None)
    found = client.search_runs([experiment], f"tags.`lakevision.key` = '{key}'")
    assert [(one.info.run_id, one.info.status) for one in found] == [(run.run_id, "FINISHED")]
    assert not list((workspace.interrupted.checkpoints / key).glob("*.pt"))
    return uninterrupted, uninterrupted_rank


def logged_weights(storage: Storage, run: RunRef, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the run logged."""
    return load_file(download_weights(storage, run, folder))


def logged_metrics(storage: Storage, run: RunRef) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of every logged metric except timings."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    names = {field.name for field in fields(EpochMetrics)} - TIMINGS - {"epoch"}
    measured = run_metrics(storage, run).keys()
    names |= {name for name in measured if name.startswith(("best_", "test_"))}
    return {name: [(one.step, one.value) for one in client.get_metric_history(run.run_id, name)] for name in names}
