"""The training loop, the same for a single process and for each rank.

`train_one_epoch`, `evaluate` and `fit` are named as in torchvision's references.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from tasks.cache.loader import Batch, CacheLoader
from tasks.cache.order import VirtualRanks
from tasks.collectives.reducer import Reducer
from tasks.errors import Diverged
from tasks.metrics.evaluate import EpochMetrics, evaluate
from tasks.model.device import RATE_FRACTION
from tasks.model.training_network import copy_of_state
from tasks.progress.activity import stepping
from tasks.refs import TRAIN, VAL
from tasks.system.signals import defer_signals
from tasks.train.buffers import VirtualBuffers, average_buffers
from tasks.train.non_finite import WAY_OUT, NonFiniteGuard
from tasks.train.progress import Progress, RunningEpoch
from tasks.train.step import StepSettings, WeightAverage, replayed_inputs, seed_step, step_seed, summed_loss
from tasks.train.step_callback import NullStepCallback

logger = logging.getLogger("lakevision.train")


@dataclass(frozen=True)
class TrainedEpoch:
    """Training metrics of an epoch, over all ranks, by their names in `EpochMetrics`."""

    train_loss: float
    train_accuracy: float
    gradient_norm: float
    """Mean over the steps of the total gradient norm, before clipping."""
    images_per_second: float
    data_wait_share: float
    """Share of this rank's training time spent waiting for batches, 0 to 1."""


@dataclass(frozen=True)
class LoopSettings:
    """Settings of all epochs of a phase."""

    schedule: Callable[[int], float]
    """Maps a step, counted over the epochs of all phases, to the learning rate of all parameter groups."""
    device: torch.device
    """Device of the model."""
    reducer: Reducer
    max_epochs: int
    """Epochs of the phase."""
    monitor: str
    """Metric of `EpochMetrics` for early stopping."""
    num_classes: int
    patient_from: float = 0.0
    """Epoch of the phase before which early stopping counts no epoch, such as the end of its warm-up."""
    breaks_ties: bool = False
    """Whether the lower loss is the better one of equal values of the metric."""
    scaler: torch.amp.GradScaler | None = None
    """Scaler of the loss, with computations in float16; None for no scaling."""
    average: WeightAverage | None = None
    """Average of the weights to validate in their place; None for the weights themselves."""
    first_epoch: int = 0
    """Number of the phase's first epoch, counted over all phases."""
    step: StepSettings = field(default_factory=StepSettings)
    step_callback: NullStepCallback = field(default_factory=NullStepCallback)
    """Decides after each step whether training continues."""
    watchers: Sequence[Callable[[], None]] = ()
    """Called after each step, before the callback."""
    buffers: VirtualBuffers | None = None
    """Buffers of this rank's virtual ranks; None: each rank is its own virtual rank."""

    @property
    def ranks(self) -> VirtualRanks:
        """The virtual ranks."""
        own = VirtualRanks.of(self.reducer.rank, self.reducer.num_ranks)
        return own if self.buffers is None else self.buffers.ranks


class StepPart(NamedTuple):
    """One of the batches whose gradients make a step, on this rank."""

    batch: Batch
    step: int
    """Number of the step in its epoch."""
    virtual: int | None
    """Virtual rank whose batch it is; None for an empty batch."""
    seed: int
    """Seed of the random numbers of its forward pass."""
    num_global_rows: int
    """Images of the whole step, over all ranks."""
    is_first: bool
    is_last: bool


def step_parts(loader: CacheLoader, loop: LoopSettings, epoch: int, running: RunningEpoch) -> Iterator[StepPart]:
    """Yield the batches that are left of an epoch, and add the time of waiting for them to `running`.

    A rank takes `accumulate_steps` batches before a step, each of all its virtual ranks.
    """
    ranks, start = loop.ranks, running.position
    num_parts = loop.step.accumulate_steps * ranks.num_turns
    first_batch = running.steps * num_parts
    began = time.perf_counter()
    for number, batch in enumerate(loader.epoch(epoch, start), first_batch):
        running.waited += time.perf_counter() - began
        step, part = divmod(number, num_parts)
        end = min(loader.num_steps, (step + 1) * num_parts)
        if part == 0:
            in_step = range(number - first_batch, end - first_batch)
            num_global_rows = sum(loader.num_global_rows(index, start) for index in in_step)
        # Seeded per batch and virtual rank, so that a run resumed here draws the same dropout as an uninterrupted one.
        turn, place = divmod(number, ranks.num_turns)
        virtual = ranks.at(place)
        seed = step_seed(loop.step.seed, epoch, turn, 0 if virtual is None else virtual)
        yield StepPart(batch, step, virtual, seed, num_global_rows, is_first=part == 0, is_last=number == end - 1)
        began = time.perf_counter()


def train_one_epoch(
    model: nn.Module,
    loader: CacheLoader,
    optimizer: torch.optim.Optimizer,
    loop: LoopSettings,
    epoch: int,
    running: RunningEpoch | None = None,
) -> TrainedEpoch:
    """Train one epoch, or the rest of a resumed one.

    Args:
        model: Takes a batch's inputs and returns logits (B, K).
        loader: This rank's share of the split `train`.
        optimizer: Optimizer of the model.
        loop: Settings of the loop.
        epoch: Number of this epoch, from 0.
        running: Position and sums of the epoch, updated after each step; None for a new epoch.

    Raises:
        Diverged: A loss or gradient is non-finite; the message names step and layer.
    """
    model.train()
    device, reducer, settings, running = loop.device, loop.reducer, loop.step, running or RunningEpoch()
    running.totals, running.gradient_norms = running.totals.to(device), running.gradient_norms.to(device)
    steps_per_epoch = count_steps(loader, settings, loop.ranks)
    scaler, scale = loop.scaler, 0.0 if loop.scaler is None else loop.scaler.get_scale()
    guard = NonFiniteGuard(model, reducer, device, epoch, steps_per_epoch, scaler)
    averaging = reducer.wrap_model(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    take_step = partial(_take_step, optimizer, parameters, settings.max_gradient_norm, guard, running, scaler)
    began = time.perf_counter()
    # Signals interrupt between steps, never within one.
    with defer_signals(), stepping("training", epoch) as begin_step:
        for part in step_parts(loader, loop, epoch, running):
            begin_step(part.step)
            if part.is_first:
                set_learning_rate(optimizer, loop.schedule(epoch * steps_per_epoch + part.step))
                optimizer.zero_grad()
            seed_step(device, part.seed)
            if loop.buffers is not None:
                loop.buffers.use(part.virtual)
            guard.begin_step(part.step, part.batch.rows_B.tolist())
            loss = None
            # To synchronized batch norms, a rank without images contributes, too.
            if len(part.batch.labels_B) or settings.sync_batch_norm:
                inputs = part.batch.inputs.to(device, non_blocking=True)
                labels_B = part.batch.labels_B.to(device, non_blocking=True)
                # Only the last part's backward pass averages gradients, so only its forward pass prepares for that.
                passed = averaging if part.is_last else model
                total = summed_loss(passed, inputs, labels_B, settings, running, reducer)
                total = guard.check_loss(total, partial(replayed_inputs, inputs, labels_B, settings, part.seed))
                # Ranks may have different numbers of images. With this divisor, the gradients averaged over the ranks
                # are exactly the gradient of the mean loss over all images of the step.
                loss = total * reducer.num_ranks / part.num_global_rows
                loss = loss if scaler is None else scaler.scale(loss)
            if not part.is_last:
                accumulate_gradients(parameters, loss)
                continue
            # A rank without images in this batch contributes gradients of zero.
            reducer.backward(loss)
            reducer.step(take_step)
            if loop.average is not None:
                loop.average.update((epoch - loop.first_epoch) * steps_per_epoch + part.step)
            running.position, running.steps = running.position + part.num_global_rows, part.step + 1
            running.seconds += time.perf_counter() - began
            for watch in loop.watchers:
                watch()
            if loop.step_callback.after_step():
                break
            began = time.perf_counter()  # The time of writing a checkpoint is not counted.
    if scaler is not None and reducer.rank == 0 and scaler.get_scale() < scale:
        logger.info("epoch %d: the loss is scaled by %g: float16 overflowed before", epoch, scaler.get_scale())
    return reduce_epoch(running, reducer)


def count_steps(loader: CacheLoader, settings: StepSettings, ranks: VirtualRanks) -> int:
    """Return the optimizer's steps per epoch; the last one may have fewer batches than the others."""
    return math.ceil(loader.num_steps / (settings.accumulate_steps * ranks.num_turns))


def accumulate_gradients(parameters: Sequence[nn.Parameter], loss: torch.Tensor | None) -> None:
    """Add the gradients of a part of a step, before the last one, to those of its earlier parts; None adds nothing.

    Unlike `Reducer.backward` of the last part, it does not run the hooks that send a gradient to the other ranks.
    """
    if loss is None:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # in the parameter's memory format, as after `backward`
        parameter.grad += gradient


def _take_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    max_norm: float | None,
    guard: NonFiniteGuard,
    running: RunningEpoch,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Step on averaged gradients: add their total norm to that of the epoch, check it, and clip them to `max_norm`.

    A scaler leaves the step out, on all ranks, where a gradient is not finite.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    running.gradient_norms += norm if scaler is None else norm.nan_to_num(0.0, 0.0)  # 0 where the step is left out.
    guard.check_gradients(norm)
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def reduce_epoch(running: RunningEpoch, reducer: Reducer) -> TrainedEpoch:
    """Return the metrics of an epoch whose steps are done, over all ranks."""
    # Read once per epoch, since reading a value synchronizes the GPU.
    totals = reducer.sum(running.totals.cpu())
    # From here on rank 0 has the sums of all ranks, so that it can write a checkpoint without the others.
    running.totals = totals if reducer.rank == 0 else torch.zeros_like(totals)
    loss, correct, count = totals.tolist()
    return TrainedEpoch(
        train_loss=loss / count,
        train_accuracy=correct / count,
        gradient_norm=float(running.gradient_norms) / max(1, running.steps),
        images_per_second=count / max(running.seconds, 1e-9),
        data_wait_share=running.waited / max(running.seconds, 1e-9),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group: all of it, or the fraction of the group's layers."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(RATE_FRACTION, 1.0)


def has_epochs_left(progress: Progress, max_epochs: int) -> bool:
    """Return whether the phase has another epoch to train."""
    return progress.next_epoch < progress.first_epoch + max_epochs and not progress.stopping.should_stop


def fit(
    model: nn.Module,
    loaders: Mapping[str, CacheLoader],
    optimizer: torch.optim.Optimizer,
    loop: LoopSettings,
    progress: Progress,
    on_epoch: Callable[[EpochMetrics, Progress], None],
) -> bool:
    """Train a phase until early stopping, its last epoch or the end of the time budget, then restore the best weights.

    Args:
        model: As for `train_one_epoch`.
        loaders: This rank's shares of the splits `train` and `val`.
        optimizer: As for `train_one_epoch`.
        loop: Settings of the loop.
        progress: State to resume from; updated after each step and epoch.
        on_epoch: Called on every rank after each epoch.

    Returns:
        Whether the time budget is used up.

    Raises:
        Diverged: A loss, a gradient or the monitored metric is non-finite.
    """
    reducer, is_over = loop.reducer, loop.step_callback.is_over()
    validated_weights = nullcontext if loop.average is None else loop.average.in_place
    # An epoch with at least one step is validated, even if the budget was used up before this process started.
    while (progress.running.steps or not is_over) and has_epochs_left(progress, loop.max_epochs):
        epoch, running = progress.next_epoch, progress.running
        with defer_signals():  # An interrupt after the last step is deferred until the epoch can be saved as trained.
            if is_over or running.is_trained:
                trained = reduce_epoch(running, reducer)  # No step is left to this process.
            else:
                trained = train_one_epoch(model, loaders[TRAIN], optimizer, loop, epoch, running)
            if not running.is_trained:
                average_buffers(model, reducer, loop.buffers)
                if loop.average is not None:
                    steps = count_steps(loaders[TRAIN], loop.step, loop.ranks)
                    loop.average.end_epoch((epoch - loop.first_epoch) * steps, running.steps)
                running.is_trained = True
        began = time.perf_counter()
        with validated_weights():
            validation = evaluate(model, loaders[VAL], loop.num_classes, loop.device, reducer)
        if not math.isfinite(validation.loss):
            # The last step made weights or batch norm's statistics non-finite, which no later step could detect.
            raise Diverged(f"the loss on the split 'val' is {validation.loss} after epoch {epoch}", way_out=WAY_OUT)
        metrics = EpochMetrics(
            epoch=epoch,
            **vars(trained),
            val_loss=validation.loss,
            val_accuracy=validation.accuracy,
            val_top5_accuracy=validation.top5_accuracy,
            val_macro_f1=validation.macro_f1,
            val_calibrated_loss=validation.calibrated_loss,
            learning_rate=max(group["lr"] for group in optimizer.param_groups),
            train_seconds=running.seconds,
            validation_seconds=time.perf_counter() - began,
        )
        with defer_signals():
            progress.history.append(metrics)
            tie = validation.loss if loop.breaks_ties else None
            if progress.stopping.update(epoch, getattr(metrics, loop.monitor), tie):
                with validated_weights():
                    progress.best_state = copy_of_state(model)
            if epoch - progress.first_epoch < loop.patient_from:
                progress.stopping.epochs_without_improvement = 0
            progress.seconds += metrics.train_seconds + metrics.validation_seconds
            progress.next_epoch, progress.running = epoch + 1, RunningEpoch()
            on_epoch(metrics, progress)
        is_over = loop.step_callback.is_over()
    if not progress.best_state:
        raise Diverged(f"{loop.monitor} was non-finite in each of {progress.next_epoch} epochs", way_out=WAY_OUT)
    model.load_state_dict(progress.best_state)
    return is_over
