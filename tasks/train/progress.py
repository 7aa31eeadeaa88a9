"""Progress of a training run: the state that a checkpoint holds besides model and optimizer, with early stopping."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tasks.config.recipe import FineTuningPlan, lower_is_better, monitored
from tasks.config.train import TrainConfig
from tasks.metrics.evaluate import EpochMetrics
from tasks.refs import RunRef


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
    best_tie: float | None = None
    """Loss of the best epoch, where ties are broken by it."""

    def update(self, epoch: int, value: float, tie: float | None = None) -> bool:
        """Record the metric of an epoch; return whether it is the best so far, False for NaN.

        Args:
            epoch: Number of the epoch.
            value: Its metric.
            tie: Its loss, by which the better one of equal values is chosen without `min_delta`; None keeps the first.
        """
        gain = 0.0 if self.best is None else (value - self.best if self.higher_is_better else self.best - value)
        loss_gain = 0.0 if tie is None or self.best_tie is None else self.best_tie - tie
        is_better = self.best is None or gain > self.min_delta or (gain == self.min_delta == 0 and loss_gain > 0)
        if is_better and not math.isnan(value):
            self.best, self.best_epoch, self.epochs_without_improvement = value, epoch, 0
            self.best_tie = tie
            return True
        self.epochs_without_improvement += 1
        return False

    @property
    def should_stop(self) -> bool:
        """True once patience is used up."""
        return self.epochs_without_improvement >= self.patience


@dataclass(frozen=True, kw_only=True)
class ReportedEpoch(EpochMetrics):
    """Metrics of an epoch as reported to the launcher."""

    ends_training: bool
    """True for the last epoch: `max_epochs` or patience is reached in the last phase, or the time budget is used up."""
    max_epochs: int
    """Maximum number of epochs of the training run, as far as it is planned."""


@dataclass
class RunningEpoch:
    """State of an epoch between two steps: its position and sums."""

    position: int = 0
    """Images that were trained on, over all ranks."""
    steps: int = 0
    totals: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    """Summed loss, correct predictions and images of this rank, float64 (3,), on the training device."""
    gradient_norms: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Sum of the total gradient norms of the steps, float64 (), on the training device."""
    seconds: float = 0.0
    """Training time."""
    waited: float = 0.0
    """Part of `seconds` spent waiting for batches."""
    is_trained: bool = False
    """True if all images were trained on, or the budget is used up, and only the validation is missing."""


@dataclass
class Progress:
    """Progress of a training run over all its phases."""

    stopping: EarlyStopping
    phase: int = 0
    """Number of the phase, from 0."""
    first_epoch: int = 0
    """First epoch of the phase."""
    next_epoch: int = 0
    """Number of the running epoch, or of the next one, counted over all phases."""
    batch_size: int | None = None
    """Images per step on each rank in this phase; None until it is chosen."""
    running: RunningEpoch = field(default_factory=RunningEpoch)
    history: list[EpochMetrics] = field(default_factory=list)
    best_state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights of the best epoch."""
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    """Moving average of the weights in the phase; empty without an average, and before its start."""
    scaler: torch.amp.GradScaler | None = None
    """Scaler of the loss in the phase; None without computations in float16."""
    folds: list[float] = field(default_factory=list)
    """Accuracy of the head on each part of a cross-validation; empty without one, and before it."""
    seconds: float = 0.0
    """Training and validation time of the finished epochs, over all starts."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The `FineTuningPlan` of the recipe; empty until the head is trained."""
    phases: list[tuple[int, str]] = field(default_factory=list)
    """First epoch and name of each phase that has begun."""
    classes: tuple[str, ...] = ()
    """Class names in the order of the logits."""
    provenance: dict[str, str] = field(default_factory=dict)
    """Provenance of the last start, from `tasks.train.provenance`."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags that the training run sets on its MLflow run."""

    @property
    def loss_scale(self) -> dict[str, Any]:
        """State of the scaler, which a checkpoint holds; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    @property
    def fine_tuning(self) -> FineTuningPlan | None:
        """The plan; None until the head is trained."""
        return FineTuningPlan.model_validate(self.plan) if self.plan else None


def new_progress(train: TrainConfig) -> Progress:
    """Return the progress of a training run that has not begun."""
    higher_is_better = not lower_is_better(monitored(train))
    return Progress(EarlyStopping(train.patience, train.min_delta, higher_is_better))


@dataclass(frozen=True)
class ResumePoint:
    """State that a training run starts from."""

    finished: RunRef | None = None
    """MLflow run of this training run, if it is finished."""
    checkpoint: str | None = None
    """Name of the checkpoint to resume from."""
    resume: str | None = None
    """Id of the MLflow run to resume."""
