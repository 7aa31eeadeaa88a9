"""Linear models, loaders of tensors and a fast training loop."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from tasks.cache.loader import Batch
from tasks.collectives.reducer import Reducer
from tasks.metrics.evaluate import EpochMetrics
from tasks.refs import TRAIN, VAL
from tasks.train.loop import LoopSettings, fit
from tasks.train.progress import EarlyStopping, Progress
from tasks.train.step import StepSettings, WeightAverage

CPU = torch.device("cpu")
NUM_CLASSES = 3


class TensorLoader:
    """Loader of the same batches in every epoch, given as lists of row numbers."""

    def __init__(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        steps: Sequence[Sequence[int]],
        global_rows: Sequence[int] | None = None,
    ) -> None:
        self._inputs = inputs
        self._labels = labels
        self._steps = steps
        self._global_rows = global_rows or [len(rows) for rows in steps]

    @property
    def num_steps(self) -> int:
        """Number of batches per epoch."""
        return len(self._steps)

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return the number of images in the step over all ranks."""
        assert start == 0
        return self._global_rows[step]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches."""
        assert start == 0
        for rows in self._steps:
            chosen = torch.tensor(list(rows), dtype=torch.int64)
            yield Batch(self._inputs[chosen], self._labels[chosen], np.array(rows, dtype=np.int64))


class Recorder:
    """Constant learning rate schedule that records the steps."""

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate
        self.steps: list[int] = []

    def __call__(self, step: int) -> float:
        """Return the learning rate, and record the step."""
        self.steps.append(step)
        return self.rate


def separable(num_rows: int = 30, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return linearly separable inputs (B, 4) in float64 and their labels (B)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_rows) % NUM_CLASSES
    inputs = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
    inputs[torch.arange(num_rows), labels] += 4.0
    return inputs, labels


def linear(seed: int = 1) -> nn.Linear:
    """Return a linear model in float64."""
    torch.manual_seed(seed)
    return nn.Linear(4, NUM_CLASSES, dtype=torch.float64)


def steps_of(num_rows: int, batch_size: int) -> list[list[int]]:
    """Split row numbers into batches."""
    return [list(range(begin, min(num_rows, begin + batch_size))) for begin in range(0, num_rows, batch_size)]


def loop_of(
    rate: Callable[[int], float],
    reducer: Reducer | None = None,
    step: StepSettings | None = None,
    *,
    device: torch.device = CPU,
    max_epochs: int = 5,
    monitor: str = "val_accuracy",
    patient_from: float = 0.0,
    average: WeightAverage | None = None,
) -> LoopSettings:
    """Return the settings of a loop with these learning rates."""
    return LoopSettings(
        rate,
        device,
        reducer or Reducer(),
        max_epochs=max_epochs,
        monitor=monitor,
        num_classes=NUM_CLASSES,
        patient_from=patient_from,
        average=average,
        step=step or StepSettings(),
    )


def fit_simply(
    model: nn.Module,
    train_loader: TensorLoader,
    val_loader: TensorLoader,
    progress: Progress,
    *,
    max_epochs: int = 5,
    monitor: str = "val_accuracy",
    rate: float = 0.1,
    reducer: Reducer | None = None,
    patient_from: float = 0.0,
    on_epoch: Callable[[EpochMetrics, Progress], None] = lambda metrics, progress: None,
) -> None:
    """Fit with plain SGD."""
    reducer = reducer or Reducer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fit(
        model,
        {TRAIN: train_loader, VAL: val_loader},
        optimizer,
        loop_of(lambda step: rate, reducer, max_epochs=max_epochs, monitor=monitor, patient_from=patient_from),
        progress,
        on_epoch,
    )


def new_progress(patience: int = 2, *, higher_is_better: bool = True) -> Progress:
    """Return the progress at the start of a training run."""
    return Progress(EarlyStopping(patience, 0.0, higher_is_better))
