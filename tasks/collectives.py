"""Collective operations of the ranks; a single process is the case of one rank."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn


class Reducer(Protocol):
    """Collective operations that the training loop needs."""

    rank: int
    num_ranks: int
    gpu_obstacle: str | None
    """Reason why these ranks cannot train on GPUs, with the way out; None if they can."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks, the same on each."""

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root` on every rank."""

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return the optimizer to pass to `step`."""

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Release an optimizer that takes no more steps, before another one is wrapped for the same model."""

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Average the gradients over all ranks, call `see_gradients`, which may change them, and step."""


class SingleProcess:
    """Collective operations of a single rank."""

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
        """Call `see_gradients`, which may change the gradients, and step."""
        see_gradients()
        optimizer.step()
