"""Detection of NaN and infinite losses and gradients, and of the layer in which they first appear."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from tasks.collectives.reducer import Reducer, broadcast_value, gather_numbers
from tasks.errors import Diverged

CHECK_EVERY_STEPS = 20
"""Steps between two checks on a GPU, where each check synchronizes the device; a CPU checks every step."""

MIN_SCALE = 1.0
"""Scale of the loss below which non-finite gradients are an error: the scaling does not cause them."""

PROBLEM = TypeAdapter(tuple[str, list[int]])
"""Type of a description and its rows."""

WAY_OUT = "lower train.learning_rate, clip the gradients (train.max_gradient_norm), or set train.precision to fp32"


@dataclass
class NonFiniteGuard:
    """Guard that checks the losses and gradients of an epoch, and names step, layer and images of the first bad one.

    On a GPU each check synchronizes the device, so it runs every CHECK_EVERY_STEPS steps. In between, a device tensor
    keeps the number of the first step with non-finite gradients.
    """

    model: nn.Module
    """The trained model."""
    reducer: Reducer
    """The other ranks."""
    device: torch.device
    """Device of the model."""
    epoch: int
    """Number of the epoch, from 0."""
    num_steps: int
    """Steps of the epoch."""
    scaler: torch.amp.GradScaler | None = None
    """Scaler of the loss. It leaves steps with non-finite gradients out and lowers the scale.

    Only those below MIN_SCALE are an error.
    """

    def __post_init__(self) -> None:
        """Start the epoch."""
        self._first = torch.full((), -1, dtype=torch.int64, device=self.device)
        self._rows: deque[tuple[int, list[int]]] = deque(maxlen=CHECK_EVERY_STEPS)
        self._step = 0
        self._is_checked = False
        self._problem = ""

    def begin_step(self, step: int, rows: list[int]) -> None:
        """Start a step on the given rows of the split `train`, or add the rows of its next batch."""
        if self._rows and self._rows[-1][0] == step:
            self._rows[-1][1].extend(rows)
            return
        self._step, self._problem = step, ""
        self._rows.append((step, rows))
        self._is_checked = should_check_finite(step, self.num_steps, self.device)

    def check_loss(self, total: torch.Tensor, replay: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of the step, (), replaced by NaN if it is non-finite.

        `check_gradients` raises the error, on every rank in the same step.

        Args:
            total: The summed loss.
            replay: Recomputes the inputs of the forward pass with the same augmentation and seed.
        """
        if not self._is_checked or bool(total.isfinite()):
            return total
        source = first_non_finite_layer(self.model, replay())
        where = f"epoch {self.epoch}, step {self._step}"
        self._problem = f"the training loss of {where} is {float(total.detach())}, which comes from {source}"
        # An infinite loss may have finite gradients; NaN makes the averaged gradients non-finite on every rank.
        return total * math.nan

    def check_gradients(self, norm: torch.Tensor) -> None:
        """Check the gradients of the step, averaged over the ranks.

        Args:
            norm: Total norm of the gradients, ().

        Raises:
            Diverged: The gradients were non-finite in this step, or in one since the last check.
        """
        if self.scaler is None:
            self._first.masked_fill_((self._first < 0) & ~norm.isfinite(), self._step)
        elif self._is_checked and not bool(norm.isfinite()) and self.scaler.get_scale() < MIN_SCALE:
            self._first.fill_(self._step)
        if not self._is_checked or (first := int(self._first)) < 0:
            return
        rows = next((rows for number, rows in self._rows if number == first), [])
        if first == self._step:
            problem = describe_gradients(self.model, self.epoch, first)
            raise agree_on_error(self.reducer, self._problem, problem, rows)
        # Without a layer: by now all weights are NaN.
        where = f"epoch {self.epoch}, step {first}"
        problem = f"the gradients of {where} were non-finite, as detected after step {self._step}"
        raise agree_on_error(self.reducer, "", problem, rows)


def should_check_finite(step: int, num_steps: int, device: torch.device) -> bool:
    """Return whether values are checked after this step of an epoch."""
    return device.type == "cpu" or step % CHECK_EVERY_STEPS == CHECK_EVERY_STEPS - 1 or step == num_steps - 1


def first_non_finite_layer(model: nn.Module, inputs: torch.Tensor) -> str:
    """Describe the first layer with a non-finite output, and whether its inputs and weights are finite."""
    found: list[str] = []

    def check(name: str, module: nn.Module, layer_inputs: Any, output: Any) -> None:
        if found or not isinstance(output, torch.Tensor) or bool(output.isfinite().all()):
            return
        weights = [key for key, value in module.named_parameters() if not bool(value.isfinite().all())]
        state = f"non-finite {' and '.join(weights)}" if weights else "finite weights"
        bad = any(isinstance(value, torch.Tensor) and not bool(value.isfinite().all()) for value in layer_inputs)
        found.append(f"the layer '{name or type(model).__name__}' ({'non-finite inputs' if bad else state})")

    leaves = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(partial(check, name)) for name, module in leaves]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss function and not from a layer"


def describe_gradients(model: nn.Module, epoch: int, step: int) -> str:
    """Describe which gradients are non-finite after a finite loss."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    bad = [name for name, value in trained if value.grad is not None and not bool(value.grad.isfinite().all())]
    return (
        f"the gradients of epoch {epoch}, step {step} are non-finite, those of {', '.join(bad[:3])} "
        f"({len(bad)} of {len(trained)} parameters)"
    )


def agree_on_error(reducer: Reducer, loss_problem: str, gradient_problem: str, rows: list[int]) -> Diverged:
    """Return the same error on every rank: that of the first rank with a non-finite loss, else that of rank 0.

    Args:
        reducer: The other ranks, which all call this in the same step.
        loss_problem: Description of this rank's loss; empty if the loss is finite.
        gradient_problem: Description of the gradients, which are non-finite on all ranks.
        rows: Rows of the split `train` in this rank's batch.
    """
    first = int(gather_numbers(reducer, bool(loss_problem)).argmax())
    problem, its_rows = broadcast_value(reducer, PROBLEM, (loss_problem or gradient_problem, rows), first)
    return Diverged(problem, its_rows, way_out=WAY_OUT)
