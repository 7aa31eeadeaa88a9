"""Values and tensors that one rank sends to the others, as JSON and in safetensors' format.

Both are data of a declared form: no rank unpickles what another one sends.
"""

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save

from tasks.collectives import Reducer

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


def wait_for_all(reducer: Reducer) -> None:
    """Wait until every rank has called this; a collective operation."""
    reducer.sum(torch.zeros(1))


def _broadcast_bytes(reducer: Reducer, content: bytes, root: int) -> bytes:
    length = int(reducer.broadcast(torch.tensor([len(content)]), root))
    if reducer.rank == root:
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()
    else:
        values = torch.empty(length, dtype=torch.uint8)
    return reducer.broadcast(values, root).numpy().tobytes() if length else b""
