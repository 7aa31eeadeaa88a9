"""The training loop: one for a single process and for every rank.

`train_one_epoch`, `evaluate` and `fit` are named as in torchvision's references.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from tasks.train.early_stopping import EarlyStopping
from tasks.train.evaluate import Loader, evaluate
from tasks.train.finite import WAY_OUT, Diverged, describe_gradients, describe_loss, diverged_on, is_look
from tasks.train.reduce import Reducer

logger = logging.getLogger("lakevision.train")


@dataclass(frozen=True)
class EpochMetrics:
    """What one epoch gave, over all ranks."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    val_top5_accuracy: float
    val_macro_f1: float
    learning_rate: float
    gradient_norm: float
    """Mean over the steps, before it is bounded."""
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


@dataclass(frozen=True)
class StepSettings:
    """What a step does beside the textbook's.

    Attributes:
        label_smoothing: Share of a target's probability that all classes get alike (Szegedy et al., "Rethinking the
            Inception Architecture", 2016, section 7); 0 for none.
        max_gradient_norm: Norm of all gradients together above which they are scaled down to it (Pascanu et al., "On
            the difficulty of training recurrent neural networks", 2013, algorithm 1); None for no bound.
    """

    label_smoothing: float = 0.0
    max_gradient_norm: float | None = None


@dataclass(frozen=True)
class TrainedEpoch:
    """What training on every picture once gave, over all ranks."""

    loss: float
    accuracy: float
    gradient_norm: float
    """Mean over the steps of the norm of all gradients together, before it is bounded."""
    images_per_second: float
    data_wait_share: float
    """Share of the time of this rank spent waiting for batches."""


def train_one_epoch(
    model: nn.Module,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    epoch: int,
    device: torch.device,
    reducer: Reducer,
    settings: StepSettings = StepSettings(),
) -> TrainedEpoch:
    """Train on every picture once.

    Args:
        model: Takes a batch's inputs, gives logits (B, K).
        loader: This rank's share of the split `train`.
        optimizer: From the reducer's `wrap_optimizer`.
        learning_rate: From the step, counted over all epochs, to the learning rate.
        epoch: Number of this epoch, from 0.
        device: Where the model is.
        reducer: The other ranks.
        settings: What a step does beside the textbook's.

    Raises:
        Diverged: A loss or a gradient is no number any more; names the step and the layer.
    """
    model.train()
    looked_at, step, problem = False, 0, ""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norms = torch.zeros((), dtype=torch.float64, device=device)

    def bound_gradients() -> None:
        nonlocal norms
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norms = norms + norm
        if looked_at and not bool(norms.isfinite()):
            raise diverged_on(reducer, problem, describe_gradients(model, epoch, step), batch.rows_B.tolist())
        if settings.max_gradient_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, settings.max_gradient_norm, norm)

    totals = torch.zeros(3, dtype=torch.float64, device=device)  # summed loss, correct, pictures
    began = waiting_since = time.perf_counter()
    waited = 0.0
    for step, batch in enumerate(loader.epoch(epoch)):
        waited += time.perf_counter() - waiting_since
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch * loader.num_steps + step)
        optimizer.zero_grad()
        looked_at = is_look(step, loader.num_steps, device)
        if len(batch.labels_B):
            inputs, labels_B = batch.inputs.to(device, non_blocking=True), batch.labels_B.to(device, non_blocking=True)
            logits_BK = _forward(model, inputs)
            losses_B = functional.cross_entropy(
                logits_BK, labels_B, reduction="none", label_smoothing=settings.label_smoothing
            )
            total = losses_B.sum()
            if looked_at and not bool(total.isfinite()):
                problem = describe_loss(model, inputs, float(total.detach()), epoch, step)
                # An infinite loss may have finite gradients: so that every rank knows, in the same step.
                total = total * math.nan
            # Ranks may hold different numbers of pictures: divided by the ranks' mean number, the average of the
            # gradients over ranks is exactly the gradient of the mean loss over all pictures of the step.
            (total * reducer.num_ranks / loader.num_global_rows(step)).backward()  # type: ignore[no-untyped-call]
            totals += torch.stack(
                [losses_B.detach().sum(), (logits_BK.argmax(1) == labels_B).sum(), losses_B.new_tensor(len(labels_B))]
            )
        # A rank without pictures in this step takes part all the same, with gradients of zero.
        reducer.step(optimizer, bound_gradients)
        waiting_since = time.perf_counter()
    seconds = time.perf_counter() - began
    # Read once an epoch: on a GPU every read of a value waits for all work before it.
    loss, correct, count = reducer.sum(totals.cpu()).tolist()
    return TrainedEpoch(
        loss=loss / count,
        accuracy=correct / count,
        gradient_norm=float(norms) / max(1, loader.num_steps),
        images_per_second=count / seconds,
        data_wait_share=waited / seconds,
    )


def _forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return logits; a lone picture goes in twice, since batch norm has no variance of one value."""
    if len(inputs) == 1 and model.training:
        logits: torch.Tensor = model(torch.cat([inputs, inputs]))
        return logits[:1]
    logits = model(inputs)
    return logits


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
    settings: StepSettings = StepSettings(),
) -> None:
    """Train until early stopping or `max_epochs`, then restore the best weights.

    Args:
        progress: Where to go on; brought up to date after each epoch.
        on_epoch: Called on every rank after each epoch.
        settings: What a step does beside the textbook's.
    """
    while progress.next_epoch < max_epochs and not progress.stopping.should_stop:
        epoch = progress.next_epoch
        # Seeded anew each epoch, so that a training resumed here draws the same dropout as one never stopped.
        torch.manual_seed((seed * 10_007 + epoch) * 4_099 + reducer.rank)
        trained = train_one_epoch(model, train_loader, optimizer, learning_rate, epoch, device, reducer, settings)
        average_buffers(model, reducer)
        validation = evaluate(model, val_loader, num_classes, device, reducer)
        metrics = EpochMetrics(
            epoch=epoch,
            train_loss=trained.loss,
            train_accuracy=trained.accuracy,
            val_loss=validation.loss,
            val_accuracy=validation.accuracy,
            val_top5_accuracy=validation.top5_accuracy,
            val_macro_f1=validation.macro_f1,
            learning_rate=optimizer.param_groups[0]["lr"],
            gradient_norm=trained.gradient_norm,
            images_per_second=trained.images_per_second,
            data_wait_share=trained.data_wait_share,
        )
        progress.history.append(metrics)
        if progress.stopping.update(epoch, getattr(metrics, monitor)):
            progress.best_state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        progress.next_epoch = epoch + 1
        on_epoch(metrics, progress)
    if not progress.best_state:
        raise Diverged(f"{monitor} was no number in any of {progress.next_epoch} epochs: {WAY_OUT}")
    model.load_state_dict(progress.best_state)
