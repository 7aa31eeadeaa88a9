"""Learning rate schedules as functions of the step, so that a resumed run has the same rates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.config.recipe import PhaseTrain, lower_is_better
from tasks.train.progress import EarlyStopping


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up from `start` to `peak`, then the schedule over the remaining steps.

    Gradual warm-up after Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2; cosine after Loshchilov and
    Hutter, "SGDR" (2017), equation 5, without restarts. One cycle after Smith and Topin, "Super-Convergence" (2018),
    with the shares and factors of torch's OneCycleLR; its rise replaces the warm-up.
    """

    start: float
    """Learning rate of the first step of the warm-up."""
    peak: float
    """Learning rate after the warm-up."""
    warmup_steps: int
    total_steps: int
    """Steps of all epochs, including the warm-up."""
    kind: Literal["cosine", "constant", "one_cycle"]
    first_step: int = 0
    """Number of the phase's first step, counted over the epochs of all phases."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over the epochs of all phases."""
        step -= self.first_step
        if self.kind == "one_cycle":
            return self._one_cycle(step)
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        left = max(1, self.total_steps - self.warmup_steps)
        return _along_cosine(self.peak, 0.0, min(1.0, (step - self.warmup_steps) / left))

    def _one_cycle(self, step: int) -> float:
        """Rise from 1/25 of the peak over 30 % of the steps, then fall to 1/10,000 of the initial rate."""
        low = self.peak / 25
        top, last = max(1.0, 0.3 * self.total_steps - 1), max(2.0, self.total_steps - 1)
        if step <= top:
            return _along_cosine(low, self.peak, step / top)
        return _along_cosine(self.peak, low / 1e4, min(1.0, (step - top) / (last - top)))


def _along_cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * 0.5 * (1.0 + math.cos(math.pi * share))


PLATEAU_FACTOR = 0.1
"""Factor of the learning rate on a plateau, as in torch's ReduceLROnPlateau."""

SCALED_WARMUP_EPOCHS = 5.0
"""Default epochs of the warm-up to a rate that is scaled up, as in Goyal et al., who train for 90."""

SCALED_WARMUP_SHARE = 0.25
"""Maximum share of a phase for that warm-up, so that the schedule has the rest."""

WARMUP_START = 0.01
"""Initial share of the rate in a warm-up to a rate that is not scaled up, as in torchvision's references
(`lr_warmup_decay` of references/classification/train.py)."""


def count_plateaus(
    values: Sequence[float], epochs: int, higher_is_better: bool, min_delta: float = 0.0, first_epoch: int = 0
) -> int:
    """Return the number of plateaus, each of `epochs` consecutive epochs without improvement.

    Args:
        values: Metric of each epoch so far; NaN never counts as improvement.
        epochs: Epochs without improvement that make a plateau.
        higher_is_better: True for an accuracy, False for a loss.
        min_delta: Smallest change that counts as improvement.
        first_epoch: First epoch that counts, after the warm-up. As in early stopping, it must improve on the epochs
            before it.
    """
    stopping = EarlyStopping(patience=epochs, min_delta=min_delta, higher_is_better=higher_is_better)
    waited = plateaus = 0
    for epoch, value in enumerate(values):
        if stopping.update(epoch, value) or epoch < first_epoch:
            waited = 0
            continue
        waited += 1
        if waited == epochs:
            plateaus, waited = plateaus + 1, 0
    return plateaus


def scaling_rule(train: PhaseTrain) -> Literal["none", "linear", "sqrt"]:
    """Return the rule by which the learning rate grows with the images per step.

    Auto is linear for SGD, after Goyal et al. (2017, arXiv:1706.02677, section 2.1). For Adam, whose updates do not
    grow with the gradients, it is the square root, after Malladi et al. (2022, arXiv:2205.10287). Their rule also
    changes Adam's betas and epsilon, which stay at torch's defaults here.
    """
    if train.scale_learning_rate != "auto":
        return train.scale_learning_rate
    return "linear" if train.optimizer == "sgd" else "sqrt"


def peak_rate(train: PhaseTrain, global_batch: int) -> float:
    """Return the learning rate of a phase for `global_batch` images per step over all ranks."""
    factor = global_batch / train.reference_batch_size
    return train.learning_rate * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[scaling_rule(train)]


def warmup_length(train: PhaseTrain, global_batch: int) -> float:
    """Return the epochs of the warm-up of a phase, with `global_batch` images per step over all ranks."""
    if train.schedule == "one_cycle":
        return 0.0
    if train.warmup_epochs is not None:
        return train.warmup_epochs
    is_scaled_up = peak_rate(train, global_batch) > train.learning_rate
    return min(SCALED_WARMUP_EPOCHS, SCALED_WARMUP_SHARE * train.max_epochs) if is_scaled_up else 0.0


def patient_from(train: PhaseTrain, warmup_epochs: float) -> float:
    """Return the epoch of a phase from which patience counts: after the warm-up, and half of a schedule that falls.

    Before its rate falls, an epoch without improvement says little about those to come. The recipe given counts from
    the warm-up on, as release 0.1.0.
    """
    falls = train.schedule in {"cosine", "one_cycle"} and train.recipe != "given"
    return warmup_epochs + (train.max_epochs - warmup_epochs) / 2 if falls else warmup_epochs


def make_schedule(
    train: PhaseTrain,
    global_batch: int,
    steps_per_epoch: int,
    *,
    history: Callable[[], Sequence[float]] = tuple,
    first_epoch: int = 0,
) -> Callable[[int], float]:
    """Return the learning rate of a phase as a function of the step, scaled by the images per step.

    The warm-up to a rate that is scaled up starts at the unscaled rate (Goyal et al. 2017, arXiv:1706.02677, section
    2.2). The warm-up to any other rate starts at WARMUP_START of it.

    Args:
        train: Settings of the phase.
        global_batch: Images per step over all ranks.
        steps_per_epoch: Steps per epoch.
        history: Returns the monitored metric of all epochs so far, including those of earlier phases.
        first_epoch: Number of the phase's first epoch, counted over all phases.
    """
    base, epochs = train.learning_rate, train.max_epochs
    peak, warmup_epochs = peak_rate(train, global_batch), warmup_length(train, global_batch)
    schedule = Schedule(
        start=base if peak > base else WARMUP_START * peak,
        peak=peak,
        warmup_steps=round(warmup_epochs * steps_per_epoch),
        total_steps=epochs * steps_per_epoch,
        kind="constant" if train.schedule == "plateau" else train.schedule,
        first_step=first_epoch * steps_per_epoch,
    )
    if train.schedule != "plateau":
        return schedule
    first_counted = first_epoch + math.ceil(warmup_epochs)

    def on_plateaus(step: int) -> float:
        # Depends on the metrics only, so that the rate of a resumed run falls like that of an uninterrupted one.
        higher_is_better = not lower_is_better(train.monitor)
        plateaus = count_plateaus(history(), train.plateau_epochs, higher_is_better, train.min_delta, first_counted)
        return schedule(step) * PLATEAU_FACTOR**plateaus

    return on_plateaus
