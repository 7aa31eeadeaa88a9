"""The training loop: one for a single process and for every rank.

`train_one_epoch`, `evaluate` and `fit` are named as in torchvision's references.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tasks.collectives import Reducer
from tasks.errors import Diverged
from tasks.metrics.epoch import EpochMetrics
from tasks.metrics.evaluate import Loader, evaluate
from tasks.model.network import at_least_two, copy_of_state
from tasks.system.signals import defer_signals
from tasks.train.non_finite import (
    WAY_OUT,
    FiniteWatch,
    describe_earlier,
    describe_gradients,
    describe_loss,
    diverged_on,
    should_check_finite,
)
from tasks.train.progress import Progress, RunningEpoch
from tasks.train.step import StepSettings, augmented, seed_step, step_seed, summed_loss
from tasks.train.step_callback import NullStepCallback

logger = logging.getLogger("lakevision.train")


@dataclass(frozen=True)
class TrainedEpoch:
    """What training on every image once gave, over all ranks."""

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
    running: RunningEpoch | None = None,
    step_callback: NullStepCallback = NullStepCallback(),
    *,
    is_over: bool = False,
) -> TrainedEpoch:
    """Train on every image once, or on those that are left of the epoch.

    Args:
        model: Takes a batch's inputs, gives logits (B, K).
        loader: This rank's share of the split `train`.
        optimizer: From the reducer's `wrap_optimizer`.
        learning_rate: From the step, counted over all epochs, to the learning rate of every parameter group.
        epoch: Number of this epoch, from 0.
        device: Where the model is.
        reducer: The other ranks.
        settings: What a step does beside the textbook's.
        running: Where the epoch stands, brought up to date after each step; None where it begins.
        step_callback: What may happen between two steps, the end of the epoch among it.
        is_over: Whether the epoch has had its last step, in a process before this one.

    Raises:
        Diverged: A loss or a gradient is no number any more; names the step and the layer.
    """
    model.train()
    running = running or RunningEpoch()
    start, first_step = running.position, running.steps
    looked_at, step, problem, rows = False, first_step, "", list[int]()
    watch = FiniteWatch(device)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    running.totals, running.gradient_norms = running.totals.to(device), running.gradient_norms.to(device)

    def bound_gradients() -> None:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        running.gradient_norms += norm
        watch.see(step, norm, rows)
        if looked_at and (bad := watch.first_bad_step()) is not None:
            if bad == step:
                raise diverged_on(reducer, problem, describe_gradients(model, epoch, step), rows)
            raise diverged_on(reducer, "", describe_earlier(epoch, bad, step), watch.rows_of(bad))
        if settings.max_gradient_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, settings.max_gradient_norm, norm)

    began = waiting_since = time.perf_counter()
    with defer_signals():  # No step is torn: what asks to leave is heard between two.
        for step, batch in enumerate(() if is_over else loader.epoch(epoch, start), first_step):
            running.waited += time.perf_counter() - waiting_since
            set_learning_rate(optimizer, learning_rate(epoch * loader.num_steps + step))
            # Seeded anew each step, so that a training resumed here draws the same dropout as one never stopped.
            seed = step_seed(settings.seed, epoch, step, reducer.rank)
            seed_step(device, seed)
            optimizer.zero_grad()
            looked_at, rows = should_check_finite(step, loader.num_steps, device), batch.rows_B.tolist()
            num_global_rows = loader.num_global_rows(step - first_step, start)
            if len(batch.labels_B):
                inputs = batch.inputs.to(device, non_blocking=True)
                labels_B = batch.labels_B.to(device, non_blocking=True)
                total = summed_loss(model, inputs, labels_B, settings, running)
                if looked_at and not bool(total.isfinite()):
                    seed_step(device, seed)  # The same augmentation and dropout again.
                    inputs, _targets = augmented(inputs, labels_B, settings)
                    problem = describe_loss(model, at_least_two(inputs), float(total.detach()), epoch, step)
                    # An infinite loss may have finite gradients: so that every rank knows, in the same step.
                    total = total * math.nan
                # Ranks may hold different numbers of images: divided by the ranks' mean number, the average of the
                # gradients over ranks is exactly the gradient of the mean loss over all images of the step.
                (total * reducer.num_ranks / num_global_rows).backward()  # type: ignore[no-untyped-call]
            # A rank without images in this step takes part all the same, with gradients of zero.
            reducer.step(optimizer, bound_gradients)
            running.position += num_global_rows
            running.steps = step + 1
            running.seconds += time.perf_counter() - began
            leave = step_callback.after_step()
            # What happens between two steps, a checkpoint it may be, is neither training nor waiting for batches.
            began = waiting_since = time.perf_counter()
            if leave:
                break
    # Read once an epoch: on a GPU every read of a value waits for all work before it.
    totals = reducer.sum(running.totals.cpu())
    # All of it is rank 0's from here on: it may write a checkpoint without the others.
    running.totals = totals if reducer.rank == 0 else torch.zeros_like(totals)
    loss, correct, count = totals.tolist()
    return TrainedEpoch(
        loss=loss / count,
        accuracy=correct / count,
        gradient_norm=float(running.gradient_norms) / max(1, running.steps),
        images_per_second=count / max(running.seconds, 1e-9),
        data_wait_share=running.waited / max(running.seconds, 1e-9),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def average_buffers(model: nn.Module, reducer: Reducer) -> None:
    """Average batch norm's running statistics over the ranks, each of which saw its own images."""
    if reducer.num_ranks == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(reducer.sum(buffer.cpu()).div_(reducer.num_ranks))


def has_epochs_left(progress: Progress, max_epochs: int) -> bool:
    """Say whether a phase of at most so many epochs has another one."""
    return progress.next_epoch < progress.first_epoch + max_epochs and not progress.stopping.should_stop


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
    device: torch.device,
    reducer: Reducer,
    on_epoch: Callable[[EpochMetrics, Progress], None],
    settings: StepSettings = StepSettings(),
    step_callback: NullStepCallback = NullStepCallback(),
) -> bool:
    """Train a phase until early stopping, `max_epochs` or the end of the budget, then restore the best weights.

    Args:
        learning_rate: From the step, counted over the phase's epochs, to the learning rate.
        progress: Where to go on; brought up to date after each step and epoch.
        max_epochs: Epochs of this phase.
        on_epoch: Called on every rank after each epoch.
        settings: What a step does beside the textbook's.
        step_callback: What may happen between two steps.

    Returns:
        Whether the time budget is used up.
    """
    is_over = step_callback.is_over()
    # An epoch that has had a step is validated, also where the budget ran out before this process.
    while (progress.running.steps or not is_over) and has_epochs_left(progress, max_epochs):
        epoch, running = progress.next_epoch, progress.running
        with defer_signals():  # An interrupt after the last step waits until the epoch can be saved as trained.
            trained = train_one_epoch(
                model, train_loader, optimizer, learning_rate, epoch, device, reducer, settings, running, step_callback,
                is_over=is_over or running.is_trained,
            )  # fmt: skip
            if not running.is_trained:
                average_buffers(model, reducer)
                running.is_trained = True
        began = time.perf_counter()
        validation = evaluate(model, val_loader, num_classes, device, reducer)
        if not math.isfinite(validation.loss):
            # Of weights that the epoch's last step spoilt, or of batch norm's statistics: the steps saw no such number.
            raise Diverged(f"the loss on the split 'val' is {validation.loss} after epoch {epoch}: {WAY_OUT}")
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
            train_seconds=running.seconds,
            validation_seconds=time.perf_counter() - began,
        )
        with defer_signals():
            progress.history.append(metrics)
            if progress.stopping.update(epoch, getattr(metrics, monitor)):
                progress.best_state = copy_of_state(model)
            progress.seconds += metrics.train_seconds + metrics.validation_seconds
            progress.next_epoch, progress.running = epoch + 1, RunningEpoch()
            on_epoch(metrics, progress)
        is_over = step_callback.is_over()
    if not progress.best_state:
        raise Diverged(f"{monitor} was no number in any of {progress.next_epoch} epochs: {WAY_OUT}")
    model.load_state_dict(progress.best_state)
    return is_over
