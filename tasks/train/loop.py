"""The training loop: one for a single process and for every rank.

`train_one_epoch`, `evaluate` and `fit` are named as in torchvision's references.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import Batch
from tasks.errors import WrongInput
from tasks.train.early_stopping import EarlyStopping
from tasks.train.reduce import Reducer

logger = logging.getLogger("lakevision.train")


class Loader(Protocol):
    """Batches of one split for one rank."""

    @property
    def num_steps(self) -> int:
        """Steps an epoch, the same on every rank."""

    def num_global_rows(self, step: int) -> int:
        """Return how many pictures all ranks together have in a step."""

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield `num_steps` batches."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split over all ranks."""

    loss: float
    """Mean cross-entropy, nats."""
    confusion_KK: torch.Tensor
    """int64 (K, K): rows are true classes, columns predicted ones."""

    @property
    def accuracy(self) -> float:
        """Share of pictures whose most probable class is the true one."""
        return float(self.confusion_KK.diagonal().sum() / self.confusion_KK.sum())


@dataclass(frozen=True)
class EpochMetrics:
    """What one epoch gave, over all ranks."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    learning_rate: float
    images_per_second: float
    data_wait_share: float
    """Share of the training time of rank 0 spent waiting for batches."""


@dataclass
class Progress:
    """Where a training stands: what a checkpoint holds beside the model and the optimizer."""

    stopping: EarlyStopping
    next_epoch: int = 0
    history: list[EpochMetrics] = field(default_factory=list)
    best_state: dict[str, torch.Tensor] = field(default_factory=dict)


class Diverged(WrongInput):
    """The loss is no number any more: with the same settings it would be so again."""


def train_one_epoch(
    model: nn.Module,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    epoch: int,
    device: torch.device,
    reducer: Reducer,
) -> tuple[float, float, float, float]:
    """Train on every picture once.

    Args:
        model: Takes a batch's inputs, gives logits (B, K).
        loader: This rank's share of the split `train`.
        optimizer: Averages gradients over the ranks in its step.
        learning_rate: From the step, counted over all epochs, to the learning rate.
        epoch: Number of this epoch, from 0.
        device: Where the model is.
        reducer: The other ranks.

    Returns:
        Loss and accuracy over all ranks, pictures a second over all ranks, share of time spent waiting for batches.
    """
    model.train()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # summed loss, correct, pictures
    began = waiting_since = time.perf_counter()
    waited = 0.0
    for step, batch in enumerate(loader.epoch(epoch)):
        waited += time.perf_counter() - waiting_since
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch * loader.num_steps + step)
        optimizer.zero_grad()
        if len(batch.labels_B):
            inputs, labels_B = batch.inputs.to(device, non_blocking=True), batch.labels_B.to(device, non_blocking=True)
            logits_BK = _forward(model, inputs)
            losses_B = functional.cross_entropy(logits_BK, labels_B, reduction="none")
            # Ranks may hold different numbers of pictures: divided by the ranks' mean number, the average of the
            # gradients over ranks is exactly the gradient of the mean loss over all pictures of the step.
            (losses_B.sum() * reducer.num_ranks / loader.num_global_rows(step)).backward()  # type: ignore[no-untyped-call]
            totals += torch.stack(
                [losses_B.detach().sum(), (logits_BK.argmax(1) == labels_B).sum(), losses_B.new_tensor(len(labels_B))]
            )
        # A rank without pictures in this step takes part all the same, with gradients of zero.
        optimizer.step()
        waiting_since = time.perf_counter()
    seconds = time.perf_counter() - began
    # Read once an epoch: on a GPU every read of a value waits for all work before it.
    loss, correct, count = reducer.sum(totals.cpu()).tolist()
    if not math.isfinite(loss):
        raise Diverged(f"the training loss of epoch {epoch} is {loss}: lower the learning rate")
    return loss / count, correct / count, count / seconds, waited / seconds


def _forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return logits; a lone picture goes in twice, since batch norm has no variance of one value."""
    if len(inputs) == 1 and model.training:
        logits: torch.Tensor = model(torch.cat([inputs, inputs]))
        return logits[:1]
    logits = model(inputs)
    return logits


def evaluate(model: nn.Module, loader: Loader, num_classes: int, device: torch.device, reducer: Reducer) -> Evaluation:
    """Return loss and confusion matrix over every picture of every rank, each counted once."""
    model.eval()
    confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)
    loss = torch.zeros(1, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for batch in loader.epoch(0):
            if len(batch.labels_B):
                inputs = batch.inputs.to(device, non_blocking=True)
                labels_B = batch.labels_B.to(device, non_blocking=True)
                logits_BK = model(inputs)
                loss += functional.cross_entropy(logits_BK, labels_B, reduction="sum").double()
                cells = labels_B * num_classes + logits_BK.argmax(1)
                confusion += torch.bincount(cells, minlength=num_classes * num_classes).double()
    # Sums of all ranks, never a rank's own figures: every rank sees the same and decides the same.
    summed = reducer.sum(torch.cat([loss, confusion]).cpu())
    matrix_KK = summed[1:].long().view(num_classes, num_classes)
    return Evaluation(loss=float(summed[0] / matrix_KK.sum()), confusion_KK=matrix_KK)


def average_buffers(model: nn.Module, reducer: Reducer) -> None:
    """Average batch norm's running statistics over the ranks, each of which saw its own pictures."""
    if reducer.num_ranks == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(reducer.sum(buffer.cpu()).div_(reducer.num_ranks))


def fit(
    model: nn.Module,
    train_loader: Loader,
    val_loader: Loader,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    progress: Progress,
    *,
    max_epochs: int,
    monitor: str,
    num_classes: int,
    seed: int,
    device: torch.device,
    reducer: Reducer,
    on_epoch: Callable[[EpochMetrics, Progress], None],
) -> None:
    """Train until early stopping or `max_epochs`, then restore the best weights.

    Args:
        progress: Where to go on; brought up to date after each epoch.
        on_epoch: Called on every rank after each epoch.
    """
    while progress.next_epoch < max_epochs and not progress.stopping.should_stop:
        epoch = progress.next_epoch
        # Seeded anew each epoch, so that a training resumed here draws the same dropout as one never stopped.
        torch.manual_seed((seed * 10_007 + epoch) * 4_099 + reducer.rank)
        loss, accuracy, images_per_second, wait = train_one_epoch(
            model, train_loader, optimizer, learning_rate, epoch, device, reducer
        )
        average_buffers(model, reducer)
        validation = evaluate(model, val_loader, num_classes, device, reducer)
        metrics = EpochMetrics(
            epoch=epoch,
            train_loss=loss,
            train_accuracy=accuracy,
            val_loss=validation.loss,
            val_accuracy=validation.accuracy,
            learning_rate=optimizer.param_groups[0]["lr"],
            images_per_second=images_per_second,
            data_wait_share=wait,
        )
        progress.history.append(metrics)
        if progress.stopping.update(epoch, getattr(metrics, monitor)):
            progress.best_state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        progress.next_epoch = epoch + 1
        on_epoch(metrics, progress)
    if not progress.best_state:
        raise Diverged(f"{monitor} was no number in any of {progress.next_epoch} epochs: lower the learning rate")
    model.load_state_dict(progress.best_state)
