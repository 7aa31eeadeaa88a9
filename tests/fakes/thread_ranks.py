"""Ranks as threads, for tests of distributed code without Horovod."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from tasks.collectives.reducer import Reducer


class ThreadRanks:
    """Shared state of the ranks: a list with a value per rank, and a barrier."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.values: list[Any] = [None] * num_ranks

    def run(self, rank_main: Callable[["ThreadReducer"], Any]) -> list[Any]:
        """Run the function on all ranks concurrently; return their results, ordered by rank."""

        def guarded(rank: int) -> Any:
            try:
                return rank_main(ThreadReducer(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.num_ranks)]
        errors = [future.exception() for future in futures if future.exception() is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class ThreadReducer(Reducer):
    """Reducer of one rank of ThreadRanks."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.num_ranks = ranks.num_ranks

    def _exchange(self, value: Any) -> list[Any]:
        self._ranks.values[self.rank] = value
        self._ranks.barrier.wait(timeout=30)
        values = list(self._ranks.values)
        self._ranks.barrier.wait(timeout=30)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        return torch.stack(self._exchange(values.clone())).sum(dim=0)

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the tensor of the rank `root`."""
        sent: torch.Tensor = self._exchange(values.clone())[root]
        return sent.clone()

    def broadcast_model(self, model: nn.Module) -> None:
        """Load the state dict of rank 0."""
        model.load_state_dict(self._exchange({name: value.clone() for name, value in model.state_dict().items()})[0])

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Remember the trained parameters."""
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    def step(self, take_step: Callable[[], None]) -> None:
        """Average the gradients over ranks, missing ones as zeros, and take a step."""
        for parameter in self._trained:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.sum(own) / self.num_ranks
        super().step(take_step)

    def shut_down(self) -> None:
        """Do nothing."""
