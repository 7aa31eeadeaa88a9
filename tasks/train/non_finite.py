"""What is no number in a step of training: found at once, and named for a person."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tasks.collectives import Reducer
from tasks.errors import Diverged

CHECK_EVERY_STEPS = 20
"""On a GPU a look at a value waits for all work before it: there it is taken after so many steps, else after each."""

WAY_OUT = "lower train.learning_rate, bound the gradients (train.max_gradient_norm), or set train.precision to fp32"


class NonFiniteGuard:
    """Checks the losses and gradients of an epoch, and names the step, layer and images of the first non-finite one.

    On a GPU every check waits for the device, so values are checked after each CHECK_EVERY_STEPS steps; a device
    tensor keeps the number of the first step whose gradients were non-finite.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, device: torch.device, epoch: int, num_steps: int) -> None:
        """Begin an epoch.

        Args:
            model: The trained model.
            reducer: The other ranks.
            device: Device of the model.
            epoch: Number of the epoch, from 0.
            num_steps: Steps of the epoch.
        """
        self._model = model
        self._reducer = reducer
        self._device = device
        self._epoch = epoch
        self._num_steps = num_steps
        self._first = torch.full((), -1, dtype=torch.int64, device=device)
        self._rows: deque[tuple[int, list[int]]] = deque(maxlen=CHECK_EVERY_STEPS)
        self._step = 0
        self._is_checked = False
        self._problem = ""

    def begin_step(self, step: int, rows: list[int]) -> None:
        """Begin a step on these rows of the split `train`."""
        self._step = step
        self._rows.append((step, rows))
        self._is_checked = should_check_finite(step, self._num_steps, self._device)

    def check_loss(self, total: torch.Tensor, replay: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of the step, (), as NaN if it is non-finite.

        Args:
            total: The summed loss.
            replay: Returns the inputs of the forward pass once more, with the same augmentation and seed.
        """
        if not self._is_checked or bool(total.isfinite()):
            return total
        self._problem = describe_loss(self._model, replay(), float(total.detach()), self._epoch, self._step)
        # An infinite loss may have finite gradients. With NaN every rank sees non-finite gradients in the same step.
        return total * math.nan

    def check_gradients(self, norm: torch.Tensor) -> None:
        """Check the gradients of the step, averaged over the ranks.

        Args:
            norm: Norm of all gradients together, ().

        Raises:
            Diverged: They were non-finite in this step, or in one since the last check.
        """
        self._first.masked_fill_((self._first < 0) & ~norm.isfinite(), self._step)
        if not self._is_checked or (first := int(self._first)) < 0:
            return
        rows = next((rows for number, rows in self._rows if number == first), [])
        if first == self._step:
            found = describe_gradients(self._model, self._epoch, first)
            raise diverged_on(self._reducer, self._problem, found, rows)
        raise diverged_on(self._reducer, "", describe_earlier(self._epoch, first, self._step), rows)


def should_check_finite(step: int, num_steps: int, device: torch.device) -> bool:
    """Say whether values are looked at after this step of an epoch."""
    return device.type == "cpu" or step % CHECK_EVERY_STEPS == CHECK_EVERY_STEPS - 1 or step == num_steps - 1


def first_bad_layer(model: nn.Module, inputs: torch.Tensor) -> str:
    """Say in which layer of a forward pass a value is no number first, and whether weights or inputs are why."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            if found or not isinstance(output, torch.Tensor) or bool(output.isfinite().all()):
                return
            weights = [key for key, value in module.named_parameters() if not bool(value.isfinite().all())]
            why = f"its {' and '.join(weights)} are no numbers" if weights else "its weights are numbers"
            bad = any(isinstance(value, torch.Tensor) and not bool(value.isfinite().all()) for value in given)
            found.append(f"the layer '{name or type(model).__name__}' ({'its inputs are none' if bad else why})")

        return look

    leaves = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "none of its layers, but the loss"


def describe_loss(model: nn.Module, inputs: torch.Tensor, loss: float, epoch: int, step: int) -> str:
    """Say where a loss comes from that is no number."""
    return (
        f"the training loss of epoch {epoch}, step {step} is {loss}, which comes from {first_bad_layer(model, inputs)}"
    )


def describe_gradients(model: nn.Module, epoch: int, step: int) -> str:
    """Say which gradients are no numbers, where the loss is one."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    bad = [name for name, value in trained if value.grad is not None and not bool(value.grad.isfinite().all())]
    return (
        f"the gradients of epoch {epoch}, step {step} are no numbers, those of {', '.join(bad[:3])} "
        f"({len(bad)} of {len(trained)} parameters)"
    )


def describe_earlier(epoch: int, step: int, seen_at: int) -> str:
    """Say that gradients were no numbers some steps ago: by now no weight is one, and no layer can be named."""
    return f"the gradients of epoch {epoch}, step {step} were no numbers, as seen after step {seen_at}"


def diverged_on(reducer: Reducer, of_loss: str, of_gradients: str, rows: list[int]) -> Diverged:
    """Return the same exception on every rank: that of the first one which found the loss to be no number.

    Args:
        reducer: The other ranks, all of which call this in the same step.
        of_loss: What this rank says of its loss; empty where that is a number.
        of_gradients: What it says of the gradients, which are no numbers on any rank.
        rows: Rows of the split `train` that this rank's step is on.
    """
    own = torch.zeros(reducer.num_ranks)
    own[reducer.rank] = float(bool(of_loss))
    first = int(reducer.sum(own).argmax())
    said, its_rows = reducer.broadcast((of_loss or of_gradients, rows), first)
    return Diverged(f"{said}: {WAY_OUT}", its_rows)
