"""Gradients in buckets of contiguous memory, each of which is averaged as soon as a backward pass has filled it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

BUCKET_BYTES = 25 << 20
"""Maximum size of a bucket with more than one gradient, as by default in torch's DistributedDataParallel."""

Send = Callable[[torch.Tensor, int], Any]
"""Begins to average a bucket, given its memory and its number, over the ranks; returns a handle."""


@dataclass
class Bucket:
    """Gradients that are sent together."""

    number: int
    parameters: list[nn.Parameter]
    memory: torch.Tensor
    """The gradients one after the other: shape (elements,)."""
    gradients: dict[nn.Parameter, torch.Tensor]
    """Parts of `memory` in the shape and memory format of the parameters."""
    missing: set[nn.Parameter]
    """Parameters without a gradient of the current step; none once the bucket is sent."""


class GradientBuckets:
    """The gradients of a model's trained parameters, filled by `backward` in the order in which it computes them.

    Weights may be in any memory format: a library that takes contiguous tensors alone gets the memory of a bucket. A
    bucket is sent while the backward pass computes the next ones (Li et al., "PyTorch Distributed: Experiences on
    Accelerating Data Parallel Training", 2020, section 3.2.3).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], send: Send) -> None:
        """Allocate the buckets, and add the hooks that fill them.

        Args:
            parameters: The trained parameters, the first layer's first.
            send: Begins to average a bucket.
        """
        self._send = send
        self._handles: list[tuple[Bucket, Any]] = []
        self._buckets = [_bucket(number, group) for number, group in enumerate(_groups(list(parameters)[::-1]))]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._fill)  # type: ignore[no-untyped-call]  # torch does not type it
            for parameter in self._bucket_of
        ]

    def complete(self) -> None:
        """Send the buckets of which the last backward pass has not filled every gradient; those count as zero.

        Gradients from earlier parts of a step count, of which the last part has none.
        """
        for bucket in self._buckets:
            for parameter in list(bucket.missing):
                self._fill(parameter)

    def sent(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield memory and handle of each bucket, once all are sent, and wait for the gradients of the next step."""
        handles, self._handles = self._handles, []
        for bucket, handle in handles:
            bucket.missing = set(bucket.parameters)
            yield bucket.memory, handle

    def release(self) -> None:
        """Remove the hooks; `backward` then sends nothing."""
        for hook in self._hooks:
            hook.remove()

    def _fill(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "hooks are those of parameters"
        bucket = self._bucket_of[parameter]
        gradient = bucket.gradients[parameter]
        with torch.no_grad():
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
        parameter.grad = gradient
        bucket.missing.discard(parameter)
        if not bucket.missing:
            self._handles.append((bucket, self._send(bucket.memory, bucket.number)))


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield neighbours of one device and data type, at most BUCKET_BYTES of them."""
    group: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        differs = group and (group[0].dtype, group[0].device) != (parameter.dtype, parameter.device)
        if group and (differs or num_bytes + size > BUCKET_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(parameter)
        num_bytes += size
    if group:
        yield group


def _bucket(number: int, parameters: list[nn.Parameter]) -> Bucket:
    memory = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters)).detach()
    parts = torch.split(memory, [parameter.numel() for parameter in parameters])
    # Parameters have no gaps between their elements, whichever memory format they are in.
    gradients = {own: part.as_strided(own.shape, own.stride()) for own, part in zip(parameters, parts, strict=True)}
    return Bucket(number, parameters, memory, gradients, set(parameters))
