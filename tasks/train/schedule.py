"""The learning rate of every step, known before the first: a resumed training computes the same one."""

import math
from dataclasses import dataclass
from typing import Literal

from tasks.config import DistributedConfig, TrainConfig


@dataclass(frozen=True)
class LearningRate:
    """A warm-up from `base` to `peak` in a straight line, then the schedule over the steps that are left.

    Gradual warm-up after Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2; cosine after Loshchilov and
    Hutter, "SGDR" (2017), equation 5, without restarts. One cycle after Smith and Topin, "Super-Convergence" (2018),
    with the shares and factors of torch's OneCycleLR; its rise is its warm-up, so it has no other.
    """

    base: float
    """Learning rate of one rank."""
    peak: float
    """Learning rate after the warm-up."""
    warmup_steps: int
    total_steps: int
    """Steps of all epochs, those of the warm-up among them."""
    schedule: Literal["cosine", "constant", "one_cycle"]

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over all epochs."""
        if self.schedule == "one_cycle":
            return self._one_cycle(step)
        if step < self.warmup_steps:
            return self.base + (self.peak - self.base) * step / self.warmup_steps
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


def learning_rate(train: TrainConfig, distributed: DistributedConfig | None, steps_an_epoch: int) -> LearningRate:
    """Return the learning rate of a training: scaled by its ranks after a warm-up, and as it is for one process."""
    factor, warmup_steps = 1.0, 0
    if distributed is not None:
        ranks = float(distributed.num_ranks)
        factor = {"linear": ranks, "sqrt": ranks**0.5, "none": 1.0}[distributed.scale_learning_rate]
        warmup_steps = round(distributed.warmup_epochs * steps_an_epoch)
    return LearningRate(
        base=train.learning_rate,
        peak=train.learning_rate * factor,
        warmup_steps=warmup_steps,
        total_steps=train.max_epochs * steps_an_epoch,
        schedule=train.schedule,
    )
