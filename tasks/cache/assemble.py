"""Batches while they are filled: reading threads put each image where it will leave the loader, in one copy."""

import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tasks.cache.order import Integers, Share

Pixels = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """What this rank wants of one row group."""

    rows_in_group: Integers
    """Ascending, shape (images,)."""
    rows: Integers
    """Their row numbers in the split, to check what was read."""
    places: list[Pixels]
    """Where each image's pixels go: writable uint8 of shape (pixel bytes,)."""
    images: Integers
    """Their numbers in the share, to hand the labels over."""


class BatchMemory:
    """Memory for batches: pinned for a GPU, else that of a batch which nobody holds any more.

    Fresh memory costs more than the copy into it: the kernel clears it page by page, and a virtual machine may have to
    ask its host. Pinned memory is torch's own to reuse, for only torch knows when a copy to the GPU is done with it.

    Attributes:
        shape: Of a batch: images, and bytes of an image.
        pin: Whether what goes to a GPU lies in page-locked memory.
    """

    def __init__(self, shape: tuple[int, int], max_batches: int, *, pin: bool) -> None:
        self.shape = shape
        self._max_batches = max_batches
        self.pin = pin
        self._lock = threading.Lock()
        self._kept: list[Pixels] = []

    @property
    def num_kept(self) -> int:
        """How many batches' memory is kept for use again."""
        return len(self._kept)

    def take(self) -> torch.Tensor:
        """Return uint8 memory of `shape` that holds anything."""
        if self.pin:
            return torch.empty(self.shape, dtype=torch.uint8, pin_memory=True)
        with self._lock:
            for pixels in self._kept:
                # References: the list, the loop's name, the argument. A tensor over it, or a view of one, is a fourth.
                if sys.getrefcount(pixels) == 3:
                    return torch.from_numpy(pixels)
            fresh: Pixels = np.empty(self.shape, dtype=np.uint8)
            if len(self._kept) < self._max_batches:
                self._kept.append(fresh)
            return torch.from_numpy(fresh)


class Assembly:
    """The batches of one epoch on one rank, from the first image placed to the moment they are handed out."""

    def __init__(self, share: Share, rows_per_group: int, memory: BatchMemory) -> None:
        self._share = share
        self._rows_per_group = rows_per_group
        self._memory = memory
        self._index = {int(group): index for index, group in enumerate(share.groups)}
        self._labels = torch.empty(len(share.rows), dtype=torch.int64, pin_memory=memory.pin)
        self._filling: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    @property
    def num_filling(self) -> int:
        """How many batches are held now."""
        return len(self._filling)

    def part(self, group: int) -> Part:
        """Return what is wanted of a row group, and make room for it."""
        index = self._index[group]
        images = self._share.images[self._share.bounds[index] : self._share.bounds[index + 1]]
        rows = self._share.rows[images]
        steps, slots = np.divmod(images, self._share.batch_size)
        batches = {step: self._batch(step) for step in np.unique(steps).tolist()}
        places = [batches[step][slot] for step, slot in zip(steps.tolist(), slots.tolist(), strict=True)]
        return Part(rows - group * self._rows_per_group, rows, places, images)

    def set_labels(self, part: Part, labels: Integers) -> None:
        """Hand over the labels of a part."""
        self._labels.numpy()[part.images] = labels

    def take(self, step: int) -> tuple[torch.Tensor, torch.Tensor, Integers]:
        """Give a whole batch away: pixels (B, pixel bytes), labels and row numbers (B,)."""
        begin = step * self._share.batch_size
        count = self._share.count(step)
        if not count:
            empty = np.empty(0, dtype=np.int64)
            return torch.empty((0, self._memory.shape[1]), dtype=torch.uint8), torch.from_numpy(empty), empty
        with self._lock:
            pixels = self._filling.pop(step)
        own = slice(begin, begin + count)
        return pixels[:count], self._labels[own], self._share.rows[own]

    def _batch(self, step: int) -> Pixels:
        with self._lock:
            if step not in self._filling:
                self._filling[step] = self._memory.take()
            return self._filling[step].numpy()


def runs(rows: Integers, longest: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the runs of consecutive numbers, none longer than `longest`."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    begin = 0
    for end in ends:
        for start in range(begin, end, longest):
            yield start, min(end, start + longest)
        begin = end
