"""A loader that holds a small split in memory and yields the same batches as `CacheLoader`."""

from collections.abc import Iterator

import torch

from tasks.cache.loader import Batch, CacheLoader

IN_MEMORY_BYTES = 1 << 30
"""Size up to which a split is held in memory."""


class InMemoryLoader(CacheLoader):
    """A loader that reads its split once, in its first epoch; order, shards and positions are those of CacheLoader."""

    _held: tuple[torch.Tensor, torch.Tensor] | None = None

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, as `CacheLoader.epoch` does."""
        share = self.share(number, start)
        if self._held is None:
            self._held = self._read()
        inputs, labels = self._held
        for batch in range(share.num_batches):
            rows = share.rows[share.images_of(batch)]
            chosen = torch.from_numpy(rows)
            yield Batch(inputs[chosen], labels[chosen], rows)

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contents and labels of all rows, of every rank."""
        inputs = torch.empty((self.num_rows, *self._shape), dtype=self._dtype)
        labels = torch.empty(self.num_rows, dtype=torch.int64)
        for batch in self.in_order().epoch(0):
            rows = torch.from_numpy(batch.rows_B)
            inputs[rows], labels[rows] = batch.inputs, batch.labels_B
        return inputs, labels
