"""Buffers of a model, such as batch norm's running statistics, which differ between virtual ranks within an epoch."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tasks.cache.order import VirtualRanks
from tasks.collectives.reducer import Reducer, broadcast_tensors
from tasks.model.training_network import copy_of_buffers, load_buffers

Buffers = dict[str, torch.Tensor]


class VirtualBuffers:
    """The buffers of this rank's virtual ranks, of which one set is in the model."""

    def __init__(self, model: nn.Module, ranks: VirtualRanks) -> None:
        """Begin with the buffers of the model for all virtual ranks.

        Args:
            model: The model.
            ranks: The virtual ranks.
        """
        self._model = model
        self.ranks = ranks
        self._current = ranks.own[0]
        self._others: dict[int, Buffers] = {virtual: copy_of_buffers(model) for virtual in ranks.own[1:]}

    def use(self, virtual: int | None) -> None:
        """Let the model have the buffers of a virtual rank; None: no change."""
        if virtual is None or virtual == self._current:
            return
        self._others[self._current] = copy_of_buffers(self._model)
        load_buffers(self._model, self._others.pop(virtual))
        self._current = virtual

    def all(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the buffers of each virtual rank of this rank."""
        self.use(self.ranks.own[0])
        return [dict(self._model.named_buffers()), *(self._others[virtual] for virtual in self.ranks.own[1:])]

    def collect(self, reducer: Reducer) -> list[Buffers]:
        """Return the buffers of all virtual ranks, in the memory of the CPU; a collective operation."""
        own = dict(zip(self.ranks.own, self.all(), strict=True))
        collected = []
        for virtual in range(self.ranks.num_virtual):
            collected.append(broadcast_tensors(reducer, own.get(virtual, {}), self.ranks.holder(virtual)))
        return collected

    def restore(self, collected: Sequence[Buffers]) -> None:
        """Restore the buffers of this rank from those of all virtual ranks."""
        first, *others = self.ranks.own
        load_buffers(self._model, collected[first])
        self._current = first
        device = {name: value.device for name, value in self._model.named_buffers()}
        for virtual in others:
            self._others[virtual] = {name: value.to(device[name]) for name, value in collected[virtual].items()}

    def reset(self) -> None:
        """Give all virtual ranks the buffers that the model has now."""
        self._current = self.ranks.own[0]
        self._others = {virtual: copy_of_buffers(self._model) for virtual in self.ranks.own[1:]}


def average_buffers(model: nn.Module, reducer: Reducer, buffers: VirtualBuffers | None = None) -> None:
    """Average batch norm's running statistics over the virtual ranks, each of which trains on its own images.

    Statistics that are equal on all of them, such as those of frozen layers, stay the same in every bit.
    """
    buffers = buffers or VirtualBuffers(model, VirtualRanks.of(reducer.rank, reducer.num_ranks))
    averaged = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    if buffers.ranks.num_virtual == 1 or not averaged:
        return
    own = [torch.cat([each[name].flatten().cpu() for name in averaged]) for each in buffers.all()]
    first = reducer.broadcast(own[0])
    # The mean of the differences from the first, since a sum of n equal values divided by n may be rounded.
    difference = torch.stack([each - first for each in own]).sum(dim=0)
    mean = first + reducer.sum(difference).div_(buffers.ranks.num_virtual)
    values_of = torch.split(mean, [buffer.numel() for buffer in averaged.values()])
    for buffer, values in zip(averaged.values(), values_of, strict=True):
        buffer.copy_(values.view_as(buffer))
    buffers.reset()
