"""Ranks that average their gradients with Horovod, over Gloo or NCCL."""

import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from torch import nn

from tasks.collectives.buckets import GradientBuckets
from tasks.collectives.reducer import SENT_TYPES, Reducer
from tasks.config.distributed import GradientCompression
from tasks.progress.activity import waiting_for_ranks
from tasks.system.cores import gpu_obstacle

FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 5e-5, 1e-3
"""Seconds between two questions whether an operation has ended: the first one, and after a while."""


class HorovodReducer(Reducer):
    """Reducer over Horovod ranks.

    Horovod's own optimizer is not used: it takes only contiguous gradients, and weights in the format of the images are
    faster. It also waits in a loop that takes a core from the threads that send (LOG.md).
    """

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
        self._sent_type = SENT_TYPES[compression]
        self._buckets: GradientBuckets | None = None
        self._num_broadcasts = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        with waiting_for_ranks():
            return _wait(hvd.allreduce_async(values.contiguous(), op=hvd.Sum))

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the tensor of the rank `root` on every rank."""
        self._num_broadcasts += 1
        name = f"lakevision.broadcast.{self._num_broadcasts}"
        with waiting_for_ranks():
            return _wait(hvd.broadcast_async(values.contiguous(), root_rank=root, name=name))

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""
        with waiting_for_ranks():
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model, whose gradients are averaged during the backward pass until `release_model`."""
        if self._buckets is None:
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
            self._buckets = GradientBuckets(trained, self._send)
        return model

    def release_model(self) -> None:
        """Remove the hooks that send gradients."""
        if self._buckets is not None:
            self._buckets.release()
        self._buckets = None

    def backward(self, loss: torch.Tensor | None) -> None:
        """Compute the gradients of this rank's images, and begin to average those of all ranks."""
        assert self._buckets is not None, "the model was wrapped"
        super().backward(loss)
        self._buckets.complete()

    def _send(self, gradients: torch.Tensor, number: int) -> tuple[int, torch.Tensor]:
        """Begin to average a bucket; return Horovod's handle, and the memory that will have the average."""
        sent = gradients if self._sent_type is None else gradients.to(self._sent_type)
        return hvd.allreduce_async_(sent, op=hvd.Average, name=f"lakevision.gradients.{number}"), sent

    def step(self, take_step: Callable[[], None]) -> None:
        """Wait for the averaged gradients, and call `take_step`."""
        assert self._buckets is not None, "the model was wrapped"
        for gradients, (handle, sent) in self._buckets.sent():
            with waiting_for_ranks():
                _wait(handle)
            if sent is not gradients:
                gradients.copy_(sent)
        take_step()

    def shut_down(self) -> None:
        """Shut Horovod down; without it, the exit of this rank raises an uncaught exception in the other ranks."""
        with waiting_for_ranks():
            hvd.shutdown()


def _wait(handle: int) -> torch.Tensor:
    """Return the result of an operation.

    Horovod's `synchronize` spins until then, and takes a core from the threads that the operation needs.
    """
    delay = FIRST_POLL_SECONDS
    while not hvd.poll(handle):
        time.sleep(delay)
        delay = min(2 * delay, MAX_POLL_SECONDS)
    result: torch.Tensor = hvd.synchronize(handle)
    return result
