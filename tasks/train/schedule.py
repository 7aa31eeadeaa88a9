"""The learning rate of every step, known before the first: a resumed training computes the same one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.train.early_stopping import EarlyStopping


@dataclass(frozen=True)
class LearningRate:
    """A warm-up from `start` to `peak` in a straight line, then the schedule over the steps that are left.

    Gradual warm-up after Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2; cosine after Loshchilov and
    Hutter, "SGDR" (2017), equation 5, without restarts. One cycle after Smith and Topin, "Super-Convergence" (2018),
    with the shares and factors of torch's OneCycleLR; its rise is its warm-up, so it has no other.
    """

    start: float
    """Learning rate of the first step of the warm-up."""
    peak: float
    """Learning rate after the warm-up."""
    warmup_steps: int
    total_steps: int
    """Steps of all epochs, those of the warm-up among them."""
    schedule: Literal["cosine", "constant", "one_cycle"]
    first_step: int = 0
    """Number of the phase's first step, counted over the epochs of all phases."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over the epochs of all phases."""
        step -= self.first_step
        if self.schedule == "one_cycle":
            return self._one_cycle(step)
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        left = max(1, self.total_steps - self.warmup_steps)
        return _along_cosine(self.peak, 0.0, min(1.0, (step - self.warmup_steps) / left))

    def _one_cycle(self, step: int) -> float:
        """Rise from a 25th of the peak over three tenths of the steps, then fall to a 10,000th of where it began."""
        low = self.peak / 25
        top, last = max(1.0, 0.3 * self.total_steps - 1), max(2.0, self.total_steps - 1)
        if step <= top:
            return _along_cosine(low, self.peak, step / top)
        return _along_cosine(self.peak, low / 1e4, min(1.0, (step - top) / (last - top)))


def _along_cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * 0.5 * (1.0 + math.cos(math.pi * share))


PLATEAU_FACTOR = 0.1
"""What the learning rate falls to on a plateau, as a share: that of torch's ReduceLROnPlateau."""

REFERENCE_BATCH = 32
"""Images a step for which `train.learning_rate` is meant where it is scaled."""

SCALED_WARMUP_EPOCHS = 5.0
"""Epochs of the warm-up to a rate that the batch scales up, where nobody chose: those of Goyal et al., of their 90."""

SCALED_WARMUP_SHARE = 0.25
"""What that warm-up has of a phase at most, so that the schedule has the rest."""

WARMUP_START = 0.01
"""Where a warm-up to a rate that is not scaled up begins, as a share of it: that of torchvision's references
(`lr_warmup_decay` of references/classification/train.py)."""


def count_plateaus(
    values: Sequence[float], epochs: int, higher_is_better: bool, min_delta: float = 0.0, first_epoch: int = 0
) -> int:
    """Return how often a metric went `epochs` epochs without an improvement, counted anew each time.

    Args:
        values: The metric of every epoch so far; NaN is no improvement.
        epochs: Epochs without improvement that make a plateau.
        higher_is_better: True for an accuracy, False for a loss.
        min_delta: The least change that counts as improvement.
        first_epoch: First epoch that counts. Those before it are what is to be improved on, as early stopping has it.
    """
    watch = EarlyStopping(patience=epochs, min_delta=min_delta, higher_is_better=higher_is_better)
    waited = plateaus = 0
    for epoch, value in enumerate(values):
        if watch.update(epoch, value) or epoch < first_epoch:
            waited = 0
            continue
        waited += 1
        if waited == epochs:
            plateaus, waited = plateaus + 1, 0
    return plateaus


def scaled(rate: float, how: Literal["none", "linear", "sqrt"], factor: float) -> float:
    """Return a rate for `factor` times the images a step (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
    grown: dict[str, float] = {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}
    return rate * grown[how]


def learning_rate(
    train: TrainConfig,
    distributed: DistributedConfig | None,
    steps_per_epoch: int,
    *,
    batch_size: int = REFERENCE_BATCH,
    base: float | None = None,
    max_epochs: int | None = None,
    history: Callable[[], Sequence[float]] = tuple,
    first_epoch: int = 0,
) -> Callable[[int], float]:
    """Return the learning rate of a phase by the step: scaled by batch size and ranks, after a warm-up.

    To a rate that is scaled up the warm-up begins with that of REFERENCE_BATCH images on one rank (Goyal et al.
    2017, arXiv:1706.02677, section 2.2), to any other with WARMUP_START of it.

    Args:
        train: Names schedule and scaling.
        distributed: The ranks; None for one process.
        steps_per_epoch: Steps of an epoch.
        batch_size: Images a step on each rank.
        base: Learning rate of the phase; None: `train.learning_rate`.
        max_epochs: Epochs of the phase; None: `train.max_epochs`.
        history: Returns the monitored metric of all epochs so far, those of earlier phases among them.
        first_epoch: The phase's first epoch, by its number over all phases.
    """
    base = train.learning_rate if base is None else base
    by_batch = peak = scaled(base, train.scale_learning_rate, batch_size / REFERENCE_BATCH)
    epochs, warmup_epochs = max_epochs or train.max_epochs, train.warmup_epochs
    if warmup_epochs is None:
        warmup_epochs = min(SCALED_WARMUP_EPOCHS, SCALED_WARMUP_SHARE * epochs) if by_batch > base else 0.0
    if distributed is not None:
        peak = scaled(by_batch, distributed.scale_learning_rate, float(distributed.num_ranks))
        if peak > max(base, by_batch):  # One rank, and a rate that ranks do not raise, have nothing to rise to.
            warmup_epochs = max(warmup_epochs, distributed.warmup_epochs)
    rate = LearningRate(
        start=base if peak > base else WARMUP_START * peak,
        peak=peak,
        warmup_steps=round(warmup_epochs * steps_per_epoch),
        total_steps=epochs * steps_per_epoch,
        schedule="constant" if train.schedule == "plateau" else train.schedule,
        first_step=first_epoch * steps_per_epoch,
    )
    if train.schedule != "plateau":
        return rate

    def on_plateaus(step: int) -> float:
        # A function of the metrics alone: a training resumed here falls as one never stopped.
        higher_is_better = train.monitor != "val_loss"
        plateaus = count_plateaus(history(), train.plateau_epochs, higher_is_better, train.min_delta, first_epoch)
        return rate(step) * PLATEAU_FACTOR**plateaus

    return on_plateaus
