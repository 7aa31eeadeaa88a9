"""What is no number in a step of training: found at once, and named for a person."""

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


class FiniteWatch:
    """Remembers the first step whose gradients were no numbers, without waiting for the device after each."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), -1, dtype=torch.int64, device=device)
        self._rows: deque[tuple[int, list[int]]] = deque(maxlen=CHECK_EVERY_STEPS)

    def see(self, step: int, gradient_norm: torch.Tensor, rows: list[int]) -> None:
        """Take in a step: the norm of its gradients, (), and the rows of the split `train` that it was on."""
        self._rows.append((step, rows))
        self._first.masked_fill_((self._first < 0) & ~gradient_norm.isfinite(), step)

    def first_bad_step(self) -> int | None:
        """Return the first step whose gradients were no numbers, or None; waits for the device."""
        first = int(self._first)
        return None if first < 0 else first

    def rows_of(self, step: int) -> list[int]:
        """Return the rows of one of the last CHECK_EVERY_STEPS steps."""
        return next((rows for number, rows in self._rows if number == step), [])


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
