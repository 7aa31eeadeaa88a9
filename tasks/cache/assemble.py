"""Assembly of batches: reader threads write each image to its place in its batch, in one copy."""

import itertools
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
    """The rows of one row group that this rank reads."""

    rows_in_group: Integers
    """Offsets of the rows in the row group, ascending, shape (images,)."""
    rows: Integers
    """Row numbers in the split, to check the rows that were read."""
    places: list[Pixels]
    """Destination of each image's pixels: writable uint8 of shape (pixel bytes,)."""
    images: Integers
    """Image numbers in the share, by which the labels are stored."""


class BatchMemory:
    """Memory for batches: pinned for a GPU, else reused from batches without references.

    Fresh memory costs more than the copy into it. The kernel clears it page by page, and a virtual machine may have to
    request it from its host. Pinned memory is reused by torch, as only torch knows when a copy to the GPU has ended.

    Attributes:
        shape: Shape of a batch: number of images, bytes per image.
        pin: Whether batches are allocated in page-locked memory.
    """

    def __init__(self, shape: tuple[int, int], max_batches: int, *, pin: bool) -> None:
        self.shape = shape
        self._max_batches = max_batches
        self.pin = pin
        self._lock = threading.Lock()
        self._kept: list[Pixels] = []

    def take(self) -> torch.Tensor:
        """Return uninitialized uint8 memory of `shape`."""
        if self.pin:
            return torch.empty(self.shape, dtype=torch.uint8, pin_memory=True)
        with self._lock:
            for pixels in self._kept:
                # References: the list, the loop variable, the argument. A tensor or a view on it adds a fourth.
                if sys.getrefcount(pixels) == 3:
                    return torch.from_numpy(pixels)
            fresh: Pixels = np.empty(self.shape, dtype=np.uint8)
            if len(self._kept) < self._max_batches:
                self._kept.append(fresh)
            return torch.from_numpy(fresh)


class Assembly:
    """The batches of one epoch on one rank, from the first image written to the return of the batch."""

    def __init__(self, share: Share, rows_per_group: int, memory: BatchMemory) -> None:
        self._share = share
        self._rows_per_group = rows_per_group
        self._memory = memory
        self._index = {int(group): index for index, group in enumerate(share.groups)}
        self._labels = torch.empty(len(share.rows), dtype=torch.int64, pin_memory=memory.pin)
        self._filling: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def part(self, group: int) -> Part:
        """Return the rows to read of a row group, and allocate the batches for them."""
        index = self._index[group]
        images = self._share.images[self._share.bounds[index] : self._share.bounds[index + 1]]
        rows = self._share.rows[images]
        numbers = np.searchsorted(self._share.begins, images, side="right") - 1
        slots = images - self._share.begins[numbers]
        batches = {number: self._batch(number) for number in np.unique(numbers).tolist()}
        places = [batches[number][slot] for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True)]
        return Part(rows - group * self._rows_per_group, rows, places, images)

    def set_labels(self, part: Part, labels: Integers) -> None:
        """Store the labels of a part."""
        self._labels.numpy()[part.images] = labels

    def take(self, number: int) -> tuple[torch.Tensor, torch.Tensor, Integers]:
        """Return a complete batch and drop it: pixels (B, pixel bytes), labels and row numbers (B,)."""
        own = self._share.images_of(number)
        if own.start == own.stop:
            empty = np.empty(0, dtype=np.int64)
            return torch.empty((0, self._memory.shape[1]), dtype=torch.uint8), torch.from_numpy(empty), empty
        with self._lock:
            pixels = self._filling.pop(number)
        return pixels[: own.stop - own.start], self._labels[own], self._share.rows[own]

    def _batch(self, number: int) -> Pixels:
        with self._lock:
            if number not in self._filling:
                self._filling[number] = self._memory.take()
            return self._filling[number].numpy()


def runs(rows: Integers, longest: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of consecutive numbers, none longer than `longest`."""
    breaks = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for begin, end in itertools.pairwise([0, *breaks, len(rows)]):
        for start in range(begin, end, longest):
            yield start, min(end, start + longest)
