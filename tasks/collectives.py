"""Collective operations of the ranks; a single process is the case of one rank."""

from collections.abc import Callable, Iterable
from typing import Protocol

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

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the tensor of rank `root` on every rank; all have the same shape and data type."""

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module for the forward pass before `backward`; `model` keeps its parameters and their names."""

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return the optimizer to pass to `step`."""

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Release an optimizer that takes no more steps, and its model, before others are wrapped."""

    def backward(self, loss: torch.Tensor | None) -> None:
        """Run the backward pass of the last batch of a step, once per step on every rank.

        Args:
            loss: The loss of the wrapped model, (); None if this rank has no images in the batch.
        """

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Average the gradients over all ranks, call `see_gradients`, which may change them, and step."""

    def shut_down(self) -> None:
        """End the communication of the ranks, after the last collective operation of all."""


class SingleProcess:
    """Collective operations of a single rank."""

    rank = 0
    num_ranks = 1
    gpu_obstacle: str | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return `values`."""
        return values

    def broadcast_model(self, model: nn.Module) -> None:
        """Do nothing."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return `model`."""
        return model

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return `optimizer`."""
        return optimizer

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def backward(self, loss: torch.Tensor | None) -> None:
        """Compute the gradients of this rank's images, if there are any."""
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not type backward

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Call `see_gradients`, which may change the gradients, and step."""
        see_gradients()
        optimizer.step()

    def shut_down(self) -> None:
        """Do nothing."""
