"""Trainings in this process that are interrupted at chosen steps, and what they must share with unbroken ones."""

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

from tasks import tracking
from tasks.collectives import SingleProcess
from tasks.config.cache import CacheConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.metrics.epoch import EpochMetrics
from tasks.refs import CacheRef, RunRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.storage import Storage, resolve_storage
from tasks.system.signals import interrupt_on
from tasks.train.checkpoint import Checkpoints
from tasks.train.identity import run_key
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.caches import write_cache
from tests.fakes.small_training import TIMINGS, Killed, same_tensors

MODEL, SIDE = "shufflenet_v2_x0_5", 32
ROWS = {TRAIN: 45, VAL: 9, TEST: 9}
BATCH, STEPS = 6, 8
"""Images a step, and the steps they make an epoch."""

SETTINGS = {
    "model": MODEL,
    "batch_size": BATCH,
    "patience": 9,
    "monitor": "val_loss",
    "num_threads": 1,
    # None within an epoch but that of who is asked to leave.
    "checkpoint_seconds": 86_400,
}


@dataclass(frozen=True)
class Interruption:
    """What ends a start of a training, and what it leaves.

    Attributes:
        how: killed loses what no checkpoint covers; asked is SIGTERM within the last step; asked in validation is
            SIGTERM in the validation of an epoch that ended with the last step.
        steps: Steps of this start.
        leaves: Where its newest checkpoint stands: stage, epoch, images of the epoch.
        repeated: Of the steps, those that the next start takes again.
    """

    how: Literal["killed", "asked", "asked in validation"]
    steps: int
    leaves: tuple[int, int, int]
    repeated: int = 0


@dataclass
class CountingRank(SingleProcess):
    """A single process that counts its steps and may be interrupted."""

    interruption: Interruption | None = None
    after_step: Callable[[], None] = lambda: None
    after_sum: Callable[[], None] = lambda: None
    steps: int = 0
    epochs: list[int] = field(default_factory=list)
    """Those that it told of."""
    _sums: int = 0

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Take the step, and be interrupted."""
        super().step(optimizer, see_gradients)
        self.steps += 1
        self.after_step()
        if self.interruption is None or self.steps != self.interruption.steps:
            return
        if self.interruption.how == "killed":
            raise Killed
        if self.interruption.how == "asked":
            signal.raise_signal(signal.SIGTERM)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, and be interrupted: of an epoch's sums the second one is its validation's."""
        self.after_sum()
        asked = self.interruption
        if asked is not None and asked.how == "asked in validation" and self.steps == asked.steps:
            self._sums += 1
            if self._sums == 2:
                signal.raise_signal(signal.SIGTERM)
        return values

    def tell(self, metrics: EpochMetrics) -> None:
        """Take in an epoch."""
        self.epochs.append(metrics.epoch)


@dataclass(frozen=True)
class Ground:
    """A cache to train from, weights to begin with, and two homes: one for trainings that nobody interrupts."""

    cache: CacheRef
    weights: Path
    unbroken: Storage
    interrupted: Storage

    def settings(self, **changes: object) -> TrainConfig:
        """Return the settings of a training whose backbone is frozen, unless it is told otherwise."""
        return TrainConfig.model_validate(SETTINGS | {"weights": str(self.weights)} | changes)


def coloured_cache(
    url: str, classes: Sequence[str] = ("blue", "green", "red"), rows: Mapping[str, int] = ROWS
) -> CacheRef:
    """Write a cache of noise in which each class has a colour of its own, at most three."""

    def draw(split: str, row: int) -> tuple[np.ndarray, int]:  # type: ignore[type-arg]
        pixels = np.random.default_rng((len(split), row)).integers(0, 150, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[..., row % len(classes)] += 100
        return pixels, row % len(classes)

    return write_cache(url, rows, draw, classes, CacheConfig(image_size=SIDE), rows_per_group=3, groups_per_file=5)


def _write_weights(path: Path) -> None:
    """Write weights drawn at random, which stand for pretrained ones: their batch norm has seen something."""
    torch.manual_seed(11)
    network = torchvision.models.get_model(MODEL, weights=None)
    with torch.no_grad():
        for _ in range(30):
            network(torch.randn(16, 3, SIDE, SIDE))
    torch.save(network.state_dict(), path)


def make_ground(folder: Path, tracking_database: Path) -> Ground:
    """Return what trainings share, both homes with a copy of the tracking database, and one folder of caches."""
    storages = []
    for name in ("unbroken", "interrupted"):
        (folder / name).mkdir()
        shutil.copy(tracking_database, folder / name)
        storages.append(resolve_storage(StorageConfig(home=str(folder / name), cache=f"{folder}/caches")))
    _write_weights(folder / "weights.pt")
    return Ground(coloured_cache(f"{folder}/caches/coloured"), folder / "weights.pt", *storages)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM do what it does in a rank."""
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM, once=True)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def standing(storage: Storage, train: TrainConfig, cache: CacheRef) -> tuple[int, int, int]:
    """Return where the newest checkpoint stands: stage, epoch, images of the epoch."""
    checkpoints = Checkpoints(storage.checkpoints / run_key(train, cache, None), keep=2, config={})
    name, _run = checkpoints.newest()
    assert name is not None
    content = checkpoints.load(name)
    return content["stage"], content["next_epoch"], content["running"]["position"]


def train_with_interruptions(
    ground: Ground,
    train: TrainConfig,
    interruptions: Sequence[Interruption],
    make_rank: Callable[[Interruption | None], CountingRank] = CountingRank,
) -> tuple[RunRef, int, list[int]]:
    """Train, interrupted by one after the other; each leaves the checkpoint that it should.

    Returns:
        The MLflow run, the steps that counted, and the epochs that were told of, over all starts.
    """
    steps, epochs = 0, list[int]()
    for interruption in interruptions:
        rank = make_rank(interruption)
        with sigterm_interrupts(), pytest.raises(Killed if interruption.how == "killed" else KeyboardInterrupt):
            train_model(
                TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted),
                reducer=rank,
                on_epoch=rank.tell,
            )
        assert standing(ground.interrupted, train, ground.cache) == interruption.leaves
        assert rank.steps == interruption.steps
        steps, epochs = steps + rank.steps - interruption.repeated, epochs + rank.epochs
    rank = make_rank(None)
    run = train_model(
        TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted), reducer=rank, on_epoch=rank.tell
    )
    return run, steps + rank.steps, epochs + rank.epochs


def check_resumed(
    ground: Ground,
    train: TrainConfig,
    interruptions: Sequence[Interruption],
    folder: Path,
    make_rank: Callable[[Interruption | None], CountingRank] = CountingRank,
) -> tuple[RunRef, CountingRank]:
    """Train interrupted and unbroken: weights and metrics are equal bit for bit, no step and no epoch counts twice.

    Returns:
        The unbroken run, and the rank that trained it.
    """
    whole = make_rank(None)
    unbroken = train_model(
        TrainingSpec(train=train, cache=ground.cache, storage=ground.unbroken), reducer=whole, on_epoch=whole.tell
    )
    run, steps, epochs = train_with_interruptions(ground, train, interruptions, make_rank)

    assert (steps, epochs) == (whole.steps, whole.epochs)
    ours = logged_weights(ground.interrupted, run, folder)
    assert same_tensors(ours, logged_weights(ground.unbroken, unbroken, folder))
    assert logged_metrics(ground.interrupted, run) == logged_metrics(ground.unbroken, unbroken)
    client = mlflow.MlflowClient(tracking_uri=ground.interrupted.tracking)
    experiment, key = client.get_run(run.run_id).info.experiment_id, run_key(train, ground.cache, None)
    found = client.search_runs([experiment], f"tags.`lakevision.key` = '{key}'")
    assert [(one.info.run_id, one.info.status) for one in found] == [(run.run_id, "FINISHED")]
    assert not list(ground.interrupted.checkpoints.glob("*/*.pt"))
    return unbroken, whole


def logged_weights(storage: Storage, run: RunRef, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the run logged."""
    return torch.load(tracking.download_weights(storage, run, folder), weights_only=True)  # type: ignore[no-any-return]


def logged_metrics(storage: Storage, run: RunRef) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of all that was logged of every metric, but of what a clock measured."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    names = {field.name for field in fields(EpochMetrics)} - TIMINGS - {"epoch"}
    measured = tracking.run_metrics(storage, run).keys()
    names |= {name for name in measured if name.startswith(("best_", "test_"))}
    return {name: [(one.step, one.value) for one in client.get_metric_history(run.run_id, name)] for name in names}
