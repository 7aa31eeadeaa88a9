"""A training step: its settings, seed and loss, and the moving average of the weights after it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tasks.collectives.reducer import Reducer
from tasks.model.sync_batch_norm import SyncBatchNorm
from tasks.model.training_network import at_least_two
from tasks.train.progress import RunningEpoch

Augment = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps inputs and labels (B,) to augmented inputs, and labels (B,) or class probabilities (B, K)."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a training step.

    Attributes:
        label_smoothing: Share of a target's probability that is distributed over all classes (Szegedy et al.,
            "Rethinking the Inception Architecture", 2016, section 7); 0 for none.
        max_gradient_norm: Maximum total norm, to which larger gradients are clipped (Pascanu et al., "On
            the difficulty of training recurrent neural networks", 2013, algorithm 1); None for no clipping.
        class_weights_K: Class weights of the loss, float32 (K,); None for equal weights.
        augment: Augmentation of the batches; None for none.
        seed: Seed of the random numbers of a step, for dropout and augmentation.
        accumulate_steps: Batches of each rank whose gradients make one step of the optimizer.
        sync_batch_norm: Whether batch norms in training take the statistics of the batches of all ranks.
    """

    label_smoothing: float = 0.0
    max_gradient_norm: float | None = None
    class_weights_K: torch.Tensor | None = None
    augment: Augment | None = None
    seed: int = 0
    accumulate_steps: int = 1
    sync_batch_norm: bool = False


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """Return a seed that differs per step and rank, in torch's range below 2^64."""
    return (((seed * 10_007 + epoch) * 1_000_003 + step) * 4_099 + rank) % 2**63


def seed_step(device: torch.device, seed: int) -> None:
    """Seed the random number generator of the device.

    On a CPU only the default generator: torch.manual_seed also records the stack for a later initialisation of CUDA,
    which takes a third of a millisecond each time.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def augmented(
    inputs: torch.Tensor, labels_B: torch.Tensor, settings: StepSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the augmented inputs and targets of a step: labels (B,), or class probabilities (B, K)."""
    return (inputs, labels_B) if settings.augment is None else settings.augment(inputs, labels_B)


def replayed_inputs(inputs: torch.Tensor, labels_B: torch.Tensor, settings: StepSettings, seed: int) -> torch.Tensor:
    """Recompute the inputs of a step's forward pass, with the same seed and augmentation."""
    seed_step(inputs.device, seed)
    return at_least_two(augmented(inputs, labels_B, settings)[0])


def summed_loss(
    model: nn.Module,
    inputs: torch.Tensor,
    labels_B: torch.Tensor,
    settings: StepSettings,
    running: RunningEpoch,
    reducer: Reducer,
) -> torch.Tensor:
    """Return the summed loss of a batch, (), and add loss, correct predictions and images to `running`.

    With `settings.sync_batch_norm` it is a collective operation, in which the batch of a rank may be empty.
    """
    inputs, targets = augmented(inputs, labels_B, settings) if len(inputs) else (inputs, labels_B)
    with SyncBatchNorm(reducer, len(inputs)) if settings.sync_batch_norm else nullcontext():
        logits_BK = model(at_least_two(inputs))[: len(inputs)]
    losses_B = functional.cross_entropy(
        logits_BK, targets, weight=settings.class_weights_K, reduction="none", label_smoothing=settings.label_smoothing
    )
    correct = (logits_BK.argmax(1) == labels_B).sum()
    # Filled on the device: a tensor of numbers is copied to it, which on a GPU waits for everything before.
    count = losses_B.new_full((), len(labels_B))
    running.totals += torch.stack([losses_B.detach().sum(), correct, count])
    return losses_B.sum()


class WeightAverage:
    """Moving average of a model over the steps of a phase, with exponential weights.

    Batch norm's statistics, which all ranks have in common after an epoch, are averaged once per epoch, with the
    weights of its steps. In release 0.1.0 they were those of the model, and still are with the recipe given.
    """

    def __init__(
        self, model: nn.Module, decay: float, average: dict[str, torch.Tensor], *, with_buffers: bool = True
    ) -> None:
        """Start with the model's weights, or with an average that was restored.

        Args:
            model: The trained model.
            decay: Share of the average that a step keeps, once many steps were taken.
            average: The average by name, updated in place for checkpoints; empty at the start of a phase.
            with_buffers: Whether to average batch norm's statistics, too.
        """
        self._decay = decay
        self._weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        buffers = model.named_buffers() if with_buffers else ()
        self._buffers = {name: value for name, value in buffers if value.is_floating_point()}
        for name, value in (self._weights | self._buffers).items():
            average[name] = average.get(name, value).detach().to(value.device, copy=True)
        self._average = average

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights after a step.

        Args:
            step: Number of the step in its phase, from 0. The first steps keep less of the initial weights, as in
                TensorFlow's ExponentialMovingAverage with `num_updates`.
        """
        weights = [value.detach() for value in self._weights.values()]
        torch._foreach_lerp_([self._average[name] for name in self._weights], weights, 1.0 - self._decay_at(step))

    @torch.no_grad()
    def end_epoch(self, first_step: int, num_steps: int) -> None:
        """Move the averaged buffers towards those of the model after an epoch.

        Args:
            first_step: Number of the epoch's first step in its phase.
            num_steps: Number of its steps.
        """
        kept = math.prod(self._decay_at(first_step + step) for step in range(num_steps))
        for name, value in self._buffers.items():
            self._average[name].lerp_(value, 1.0 - kept)

    def _decay_at(self, step: int) -> float:
        return min(self._decay, (1 + step) / (10 + step))

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Give the model the averages, and its own values back at the end, in every bit."""
        replaced = self._weights | self._buffers
        own = {name: value.detach().clone() for name, value in replaced.items()}
        try:
            for name, value in replaced.items():
                value.copy_(self._average[name])
            yield
        finally:
            for name, value in replaced.items():
                value.copy_(own[name])
