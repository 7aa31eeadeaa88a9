"""Training of a small network with checkpoints, which can be killed after any step."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tasks.cache.loader import Batch
from tasks.collectives.reducer import Reducer
from tasks.metrics.evaluate import EpochMetrics
from tasks.refs import TRAIN, VAL
from tasks.train.checkpoint import Checkpoints, restore, restore_progress
from tasks.train.loop import LoopSettings, fit
from tasks.train.progress import EarlyStopping, Progress
from tasks.train.step import StepSettings, WeightAverage
from tasks.train.step_callback import StepCallback

MAX_EPOCHS = 5
NUM_STEPS = 6
TIMINGS = {"images_per_second", "data_wait_share", "train_seconds", "validation_seconds"}
CONFIG = {"train": {"seed": 1, "model": "resnet18"}, "cache": "digest"}


class Killed(BaseException):
    """Substitute for SIGKILL: nothing in the loop may catch it."""


class ShufflingLoader:
    """Loader of 40 rows of noise in batches of 7, shuffled with the epoch as seed."""

    num_steps = NUM_STEPS

    def __init__(self, after_batch: Callable[[int, int], None] = lambda epoch, step: None) -> None:
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(40, 5, generator=generator)
        self._labels = torch.randint(0, 3, (40,), generator=generator)
        self._after_batch = after_batch

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return the number of rows in the step."""
        return min(7, 40 - start - 7 * step)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from row `start` of its order."""
        order = torch.from_numpy(np.random.default_rng(number).permutation(40))[start:]
        for step, chosen in enumerate(order.split(7) if len(order) else []):
            yield Batch(self._inputs[chosen], self._labels[chosen], chosen.numpy())
            self._after_batch(number, start // 7 + step)


class Training:
    """State of a training process, created as in a new process."""

    def __init__(self, folder: Path, optimizer: str = "adam", **options: float) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        parameters = self.model.parameters()
        self.optimizer = (
            torch.optim.Adam(parameters) if optimizer == "adam" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        )
        self.progress = Progress(EarlyStopping(patience=4, min_delta=0.0, higher_is_better=False))
        self.checkpoints = Checkpoints(folder, keep=2, config=CONFIG)
        self._checkpoint_seconds = options.get("checkpoint_seconds", 0.0)
        self._ema_decay = options.get("ema_decay")
        self._accumulate_steps = int(options.get("accumulate_steps", 1))
        self._budget = options.get("budget", float("inf"))

    def run(
        self,
        after_batch: Callable[[int, int], None] = lambda epoch, step: None,
        after_validated_batch: Callable[[int, int], None] = lambda epoch, step: None,
    ) -> None:
        """Train to the end, with a checkpoint after every step; resume from the newest checkpoint."""
        progress = self.progress
        name, _content = self.checkpoints.newest()
        if name is not None:
            content = self.checkpoints.load(name)
            restore_progress(content, progress)
            restore(content, self.model, self.optimizer)

        def save() -> None:
            collected = self.checkpoints.collect(self.model, self.optimizer, progress, Reducer())
            assert self.checkpoints.save(collected, progress, "run")

        def on_epoch(_metrics: EpochMetrics, _progress: Progress) -> None:
            save()

        loop = LoopSettings(
            lambda step: 0.001 * (1 + step),
            torch.device("cpu"),
            Reducer(),
            max_epochs=MAX_EPOCHS,
            monitor="val_loss",
            num_classes=3,
            average=None if self._ema_decay is None else WeightAverage(self.model, self._ema_decay, progress.average),
            step=StepSettings(seed=1, accumulate_steps=self._accumulate_steps),
            step_callback=StepCallback(
                Reducer(),
                save,
                checkpoint_seconds=self._checkpoint_seconds,
                # The clock counts steps.
                seconds_left=lambda: self._budget - len(progress.history) * NUM_STEPS - progress.running.steps,
            ),
        )
        loaders = {TRAIN: ShufflingLoader(after_batch), VAL: ShufflingLoader(after_validated_batch)}
        fit(self.model, loaders, self.optimizer, loop, progress, on_epoch)

    def losses(self) -> list[dict[str, float]]:
        """Return the history without timings."""
        return [
            {name: value for name, value in asdict(metrics).items() if name not in TIMINGS}
            for metrics in self.progress.history
        ]


def newest_run(folder: Path) -> tuple[str | None, str]:
    """Return the name of the newest checkpoint in a folder, and its MLflow run."""
    name, content = Checkpoints(folder, 2, CONFIG).newest()
    return name, content["run_id"]


def kill_at(epoch: int, step: int) -> Callable[[int, int], None]:
    """Return a callback that raises `Killed` when the batch after this step is requested."""

    def kill(current_epoch: int, current_step: int) -> None:
        if (current_epoch, current_step) == (epoch, step):
            raise Killed

    return kill


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts are bit-identical."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def optimizer_state(training: Training) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors by parameter and name."""
    return {
        f"{parameter}.{name}": value
        for parameter, state in training.optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(resumed: Training, uninterrupted: Training) -> None:
    """Assert that two training runs ended in bit-identical states."""
    assert same_tensors(resumed.model.state_dict(), uninterrupted.model.state_dict())
    assert same_tensors(resumed.progress.average, uninterrupted.progress.average)
    assert same_tensors(resumed.progress.best_state, uninterrupted.progress.best_state)
    assert same_tensors(optimizer_state(resumed), optimizer_state(uninterrupted))
    assert resumed.losses() == uninterrupted.losses()
    assert resumed.progress.stopping == uninterrupted.progress.stopping
