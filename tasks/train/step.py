"""What one step of training computes: its settings, its seed and its loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tasks.model.network import at_least_two
from tasks.train.progress import RunningEpoch

Augment = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From inputs and labels (B,) to other inputs, and labels (B,) or the probabilities of the classes, (B, K)."""


@dataclass(frozen=True)
class StepSettings:
    """What a step does beside the textbook's.

    Attributes:
        label_smoothing: Share of a target's probability that all classes get alike (Szegedy et al., "Rethinking the
            Inception Architecture", 2016, section 7); 0 for none.
        max_gradient_norm: Norm of all gradients together above which they are scaled down to it (Pascanu et al., "On
            the difficulty of training recurrent neural networks", 2013, algorithm 1); None for no bound.
        class_weights_K: How much each class counts in the loss, float32 (K,); None: all alike.
        augment: Changes the batches; None leaves them as they are.
        seed: Draws what a step draws: dropout, augmentation.
    """

    label_smoothing: float = 0.0
    max_gradient_norm: float | None = None
    class_weights_K: torch.Tensor | None = None
    augment: Augment | None = None
    seed: int = 0


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """Return another seed for every step of every rank, as torch takes it: below 2^64."""
    return (((seed * 10_007 + epoch) * 1_000_003 + step) * 4_099 + rank) % 2**63


def seed_step(device: torch.device, seed: int) -> None:
    """Seed what a step on the device draws from.

    On a CPU its generator alone: torch.manual_seed notes the stack for a CUDA that may come later, a third of a
    millisecond each time.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def augmented(
    inputs: torch.Tensor, labels_B: torch.Tensor, settings: StepSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs that a step trains on, and its targets: labels (B,), or probabilities of the classes (B, K)."""
    return (inputs, labels_B) if settings.augment is None else settings.augment(inputs, labels_B)


def replayed_inputs(inputs: torch.Tensor, labels_B: torch.Tensor, settings: StepSettings, seed: int) -> torch.Tensor:
    """Return the inputs of a step's forward pass once more: seeded alike, with the same augmentation."""
    seed_step(inputs.device, seed)
    return at_least_two(augmented(inputs, labels_B, settings)[0])


def summed_loss(
    model: nn.Module, inputs: torch.Tensor, labels_B: torch.Tensor, settings: StepSettings, running: RunningEpoch
) -> torch.Tensor:
    """Return the summed loss of a batch, (), and count what it was."""
    inputs, targets = augmented(inputs, labels_B, settings)
    logits_BK = model(at_least_two(inputs))[: len(inputs)]
    losses_B = functional.cross_entropy(
        logits_BK,
        targets,
        weight=settings.class_weights_K,
        reduction="none",
        label_smoothing=settings.label_smoothing,
    )
    correct = (logits_BK.argmax(1) == labels_B).sum()
    running.totals += torch.stack([losses_B.detach().sum(), correct, losses_B.new_tensor(len(labels_B))])
    return losses_B.sum()
