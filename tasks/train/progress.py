"""Where a training stands: what a checkpoint holds beside the model and the optimizer."""

from dataclasses import dataclass, field

import torch

from tasks.metrics.epoch import EpochMetrics
from tasks.refs import RunRef
from tasks.train.early_stopping import EarlyStopping


@dataclass(frozen=True)
class ReportedEpoch(EpochMetrics):
    """An epoch as whoever watches the training is told of it."""

    ends_training: bool
    """No epoch comes after it: all are trained, patience has run out in the last phase, or the time budget is used."""


@dataclass
class RunningEpoch:
    """An epoch between two steps: where it stands, and its sums so far."""

    position: int = 0
    """Images of all ranks that were trained on."""
    steps: int = 0
    totals: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    """Summed loss, correct predictions and images of this rank, float64 (3,), on the training device."""
    gradient_norms: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Sum over the steps, float64 (), on the training device."""
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds of it spent waiting for batches."""
    is_over: bool = False
    """No step is left to this process: the time budget is used up, or the epoch is trained."""
    is_trained: bool = False
    """Every image was seen, or the budget is used up: what lacks is the validation."""


@dataclass
class Progress:
    """Where a training stands, over all its phases."""

    stopping: EarlyStopping
    phase: int = 0
    """0 is the first; each entry of `train.fine_tune` is another."""
    first_epoch: int = 0
    """First epoch of the phase."""
    next_epoch: int = 0
    """The epoch that runs, or comes next; epochs count over all phases."""
    batch_size: int | None = None
    """Images a step on each rank in this phase; None until it is chosen."""
    running: RunningEpoch = field(default_factory=RunningEpoch)
    history: list[EpochMetrics] = field(default_factory=list)
    best_state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights of the best epoch."""
    seconds: float = 0.0
    """Time of training and validation of the epochs that ended, over all starts."""
    classes: tuple[str, ...] = ()
    """Names of what it tells apart, in the order of the logits."""
    provenance: dict[str, str] = field(default_factory=dict)
    """What the last start was computed on and with, as `tasks.train.provenance` names it."""
    tags: dict[str, str] = field(default_factory=dict)
    """What the MLflow run is to say of the training, by tag."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a training begins."""

    finished: RunRef | None = None
    """The run of exactly this training, where it is done."""
    checkpoint: str | None = None
    """Name of the checkpoint to go on from."""
    resume: str | None = None
    """The MLflow run to go on with."""
