"""Early stopping by a validation metric."""

import math
from dataclasses import dataclass


@dataclass
class EarlyStopping:
    """Patience counter for one validation metric, independent of models.

    Attributes:
        patience: Epochs without improvement after which training stops.
        min_delta: Smallest change that counts as improvement.
        higher_is_better: True for an accuracy, False for a loss.
    """

    patience: int
    min_delta: float
    higher_is_better: bool
    best: float | None = None
    best_epoch: int = -1
    epochs_without_improvement: int = 0

    def update(self, epoch: int, value: float) -> bool:
        """Record the metric of an epoch; return whether it is the best so far, False for NaN."""
        if math.isnan(value):
            self.epochs_without_improvement += 1
            return False
        gain = 0.0 if self.best is None else (value - self.best if self.higher_is_better else self.best - value)
        if self.best is None or gain > self.min_delta:
            self.best, self.best_epoch, self.epochs_without_improvement = value, epoch, 0
            return True
        self.epochs_without_improvement += 1
        return False

    @property
    def should_stop(self) -> bool:
        """True once patience is used up."""
        return self.epochs_without_improvement >= self.patience
