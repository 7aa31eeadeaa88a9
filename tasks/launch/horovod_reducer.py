"""Ranks that average their gradients with Horovod, over Gloo or NCCL."""

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from tasks.collectives import SingleProcess
from tasks.config.distributed import GradientCompression
from tasks.launch.gpu_obstacle import gpu_obstacle
from tasks.progress.activity import waiting_for_ranks


class HorovodReducer(SingleProcess):
    """Reducer over Horovod ranks."""

    takes_channels_last = False  # Horovod accepts only contiguous gradients.

    def __init__(self, compression: GradientCompression = "none") -> None:
        """Wait for the other ranks, whose rendezvous is in the environment.

        Args:
            compression: Number format in which gradients are sent.
        """
        with waiting_for_ranks():
            hvd.init()
        self.rank: int = hvd.rank()
        self.num_ranks: int = hvd.size()
        self.gpu_obstacle = gpu_obstacle("horovod", hvd.nccl_built(), hvd.local_size(), torch.cuda.device_count())
        self._compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[compression]
        self._num_broadcasts = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        with waiting_for_ranks():
            summed: torch.Tensor = hvd.allreduce(values.contiguous(), op=hvd.Sum)
        return summed

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the tensor of the rank `root` on every rank."""
        self._num_broadcasts += 1
        name = f"lakevision.broadcast.{self._num_broadcasts}"
        with waiting_for_ranks():
            sent: torch.Tensor = hvd.broadcast(values.contiguous(), root_rank=root, name=name)
        return sent

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""
        with waiting_for_ranks():
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return Horovod's optimizer, which averages gradients during the backward pass."""
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=trained, compression=self._compression
        )
        # Horovod creates a new optimizer from the parameter groups only: copy the state of a resumed one.
        wrapped.load_state_dict(optimizer.state_dict())
        return wrapped

    def release_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the optimizer's gradient hooks."""
        averaging: Any = optimizer
        # The hooks are on graph nodes that only this optimizer references. If they stayed, they would send the
        # gradients of the next optimizer's training under this one's names.
        averaging._grad_accs.clear()

    def step(self, optimizer: torch.optim.Optimizer, see_gradients: Callable[[], None]) -> None:
        """Wait for the averaged gradients, call `see_gradients`, which may change them, and step."""
        averaging: Any = optimizer
        with waiting_for_ranks():
            averaging.synchronize()
        see_gradients()
        with averaging.skip_synchronize():
            averaging.step()

    def shut_down(self) -> None:
        """Shut Horovod down; without it, the exit of this rank raises an uncaught exception in the other ranks."""
        with waiting_for_ranks():
            hvd.shutdown()
