"""The error of a training process that runs out of memory, with the setting to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tasks.config.train import TrainConfig
from tasks.errors import OutOfMemory

ALLOCATORS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "_ALLOC_FAILED")
"""Texts by which torch reports on the CPU, and libraries such as cuBLAS on a GPU, that memory is used up."""

ONEDNN = re.compile(r"could not create a (primitive|memory object)$")
"""Texts of oneDNN, which computes on the CPU, when it gets no memory for its generated code or its buffers.

A "primitive descriptor" that cannot be created is another error: the operation is not supported."""

_SIZE = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is used up, of the process or of its GPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and (
        any(text in message for text in ALLOCATORS) or ONEDNN.search(message) is not None
    )


def out_of_memory(error: BaseException, train: TrainConfig, rank: int) -> OutOfMemory:
    """Return the error for users.

    Args:
        error: The error of torch, of a library or of Python.
        train: Settings of the training.
        rank: The rank in which it occurred.
    """
    size = _SIZE.search(str(error))
    asked = f" when it asked for {size[1]}" if size else ""
    advice = (
        "use a smaller train.model or cache.image_size"
        if train.batch_size == 1
        else f"lower train.batch_size, which is {train.batch_size}"
        + (", or set it to auto" if train.batch_size != "auto" else "")
        + "; a higher train.accumulate_steps keeps the images per step"
    )
    return OutOfMemory(f"rank {rank} ran out of memory{asked}: {advice}")


@contextmanager
def translate_out_of_memory(train: TrainConfig, rank: int) -> Iterator[None]:
    """Raise `OutOfMemory` in place of an error within the block that means that memory is used up.

    Raises:
        OutOfMemory: As `out_of_memory`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, train, rank) from error
