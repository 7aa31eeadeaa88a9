"""Collective operations of the ranks, and what they send each other; a single process is the case of one rank.

Values are sent as JSON and tensors in safetensors' format. Both are data of a declared form: no rank unpickles what
another one sends.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import nn

from tasks.errors import WrongInput

SENT_TYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Data type in which gradients are sent, by the setting; None for their own. Horovod has no bf16."""


class Reducer:
    """Collective operations that the training loop needs, of a single process; those of several ranks override them."""

    rank = 0
    num_ranks = 1
    gpu_obstacle: WrongInput | None = None
    """Reason why these ranks cannot train on GPUs; None if they can."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks, the same on each."""
        return values

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the tensor of rank `root` on every rank; all have the same shape and data type."""
        return values

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module for the forward pass before `backward`, the same until `release_model`.

        The gradients of the parameters that are trained now are averaged; `model` keeps its parameters and their names.
        """
        return model

    def release_model(self) -> None:
        """Release the wrapped model, if there is one, before another one is wrapped."""

    def backward(self, loss: torch.Tensor | None) -> None:
        """Run the backward pass of the last batch of a step, once per step on every rank.

        Args:
            loss: The loss of the wrapped model, (); None if this rank has no images in the batch.
        """
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not type backward

    def step(self, take_step: Callable[[], None]) -> None:
        """Average the gradients over all ranks, and call `take_step`, the step of the optimizer."""
        take_step()

    def shut_down(self) -> None:
        """End the communication of the ranks, after the last collective operation of all."""


T = TypeVar("T")

FLAG = TypeAdapter(bool)
"""Type of a decision."""


def broadcast_value(reducer: Reducer, kind: TypeAdapter[T], value: T | None, root: int = 0) -> T:
    """Return the value of rank `root` on every rank; a collective operation.

    Args:
        reducer: The ranks.
        kind: Type of the value, which the receivers check.
        value: The value; other ranks than `root` may give None.
        root: The rank that sends.
    """
    if reducer.num_ranks == 1:
        return cast(T, value)
    content = kind.dump_json(cast(T, value)) if reducer.rank == root else b""
    return kind.validate_json(_broadcast_bytes(reducer, content, root))


def broadcast_tensors(reducer: Reducer, tensors: Mapping[str, torch.Tensor], root: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of rank `root` on every rank, on the CPU; a collective operation.

    Args:
        reducer: The ranks.
        tensors: Tensors by name; those of other ranks than `root` are not used.
        root: The rank that sends.
    """
    content = b""
    if reducer.rank == root:
        content = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    return load(_broadcast_bytes(reducer, content, root))


def gather_numbers(reducer: Reducer, own: float) -> torch.Tensor:
    """Return a number of each rank, float64 (ranks,); a collective operation."""
    numbers = torch.zeros(reducer.num_ranks, dtype=torch.float64)
    numbers[reducer.rank] = own
    return reducer.sum(numbers)


def gather_rows(reducer: Reducer, own: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, float64 (rows, ...), in the order of the ranks; a collective operation.

    Args:
        reducer: The ranks.
        own: Rows of this rank, float64 (own rows, ...), on the CPU; each rank may have another number of them.
    """
    numbers = gather_numbers(reducer, len(own)).long().tolist()
    # Each rank fills its own slice, and the sum is a gather: reducers need no other collective operation.
    rows, begin = own.new_zeros((sum(numbers), *own.shape[1:])), sum(numbers[: reducer.rank])
    rows[begin : begin + len(own)] = own
    return reducer.sum(rows) if len(rows) else rows


def wait_for_all(reducer: Reducer) -> None:
    """Wait until every rank has called this; a collective operation."""
    reducer.sum(torch.zeros(1))


def _broadcast_bytes(reducer: Reducer, content: bytes, root: int) -> bytes:
    length = int(reducer.broadcast(torch.tensor([len(content)]), root))
    if length == 0:
        return b""
    values = torch.frombuffer(bytearray(content or bytes(length)), dtype=torch.uint8)  # Zeros where it is received.
    return reducer.broadcast(values, root).numpy().tobytes()


HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of rank 0, without which Horovod warns that it is missing."""


def run_on_rank_zero(reducer: Reducer, kind: TypeAdapter[T], work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank; all ranks call this.

    An exception in `work` ends rank 0, and the launcher then ends the other ranks.

    Args:
        reducer: The ranks.
        kind: Type of the result.
        work: The work; it has no collective operation.
    """
    if reducer.rank != 0:
        return wait_for_rank_zero(reducer, kind)
    if reducer.num_ranks == 1:
        return work()
    finished = threading.Event()

    def send_heartbeats() -> None:
        while not finished.wait(HEARTBEAT_SECONDS):
            broadcast_value(reducer, FLAG, False)

    heartbeats = threading.Thread(target=send_heartbeats, name="rank-0-heartbeat")
    heartbeats.start()
    try:
        result = work()
    finally:
        finished.set()
        heartbeats.join()
    broadcast_value(reducer, FLAG, True)
    return broadcast_value(reducer, kind, result)


def wait_for_rank_zero(reducer: Reducer, kind: TypeAdapter[T]) -> T:
    """Return the result of rank 0's work, on another rank."""
    while not broadcast_value(reducer, FLAG, None):
        continue  # A heartbeat.
    return broadcast_value(reducer, kind, None)
