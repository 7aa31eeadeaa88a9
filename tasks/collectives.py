"""How ranks agree: one process is the case of one rank."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn


class Reducer(Protocol):
    """What the training loop needs of the other ranks."""

    rank: int
    num_ranks: int
    gpu_obstacle: str | None
    """Why these ranks cannot train on GPUs, with the way out; None where they can."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks, the same on each."""

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of the rank `root` on every rank."""

    def broadcast_model(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return an optimizer for `step`."""

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take no step with it any more: another is wrapped for parameters of the same model."""

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Average the gradients over all ranks, let them be seen or changed, and take the step."""


class SingleProcess:
    """One rank: nothing to agree on."""

    rank = 0
    num_ranks = 1
    gpu_obstacle: str | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return `value`."""
        return value

    def broadcast_model(self, model: nn.Module) -> None:
        """Do nothing."""

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return `optimizer`."""
        return optimizer

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Let the gradients be seen or changed, and take the step."""
        see_gradients()
        optimizer.step()
