"""From a cache to batches: petastorm reads row groups, this module shuffles and batches them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tasks.cache.manifest import CacheManifest
from tasks.cache.reader import open_reader
from tasks.cache.write import PADDING
from tasks.storage import local_path


class Batch(NamedTuple):
    """Pictures of one step on one rank; padding is already left out, so that B may be less than asked for, or 0."""

    inputs: torch.Tensor
    """Pictures: uint8, shape (B, H, W, 3). Features of a frozen backbone: float32, shape (B, F)."""
    labels_B: torch.Tensor
    """int64 class indices, shape (B,)."""
    rows_B: npt.NDArray[np.int64]
    """Numbers of the rows in the split, shape (B,)."""


def _file_url(url: str, name: str) -> str:
    path = local_path(url)
    # A folder stays a path: in a URL its spaces and umlauts would be escaped, and petastorm does not unescape.
    return f"{url.rstrip('/')}/{name}" if path is None else str(path.absolute() / name)


class _ShufflePool:
    """Rows waiting to be drawn: at random with a generator, else in the order they came."""

    def __init__(self, capacity: int, row_bytes: int, generator: np.random.Generator | None) -> None:
        self._pixels = np.empty((capacity, row_bytes), dtype=np.uint8)
        self._labels = np.empty(capacity, dtype=np.int64)
        self._rows = np.empty(capacity, dtype=np.int64)
        self._generator = generator
        self.size = 0
        self.capacity = capacity

    def add(self, pixels: list[bytes], labels: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        end = self.size + len(rows)
        for place, picture in enumerate(pixels, start=self.size):
            self._pixels[place] = np.frombuffer(picture, dtype=np.uint8)
        self._labels[self.size : end] = labels
        self._rows[self.size : end] = rows
        self.size = end

    def draw(self, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Take `count` rows out; the arrays are the caller's own."""
        if self._generator is None:
            chosen = np.arange(count)
        else:
            chosen = self._generator.choice(self.size, size=count, replace=False, shuffle=True)
        taken = self._pixels[chosen], self._labels[chosen], self._rows[chosen]
        kept = self.size - count
        if self._generator is None:
            for column in (self._pixels, self._labels, self._rows):
                column[:kept] = column[count : self.size].copy()
        else:
            # Fill the holes from the end: moves at most `count` rows, however large the pool.
            holes = np.sort(chosen[chosen < kept])
            movers = np.setdiff1d(np.arange(kept, self.size), chosen, assume_unique=True)
            for column in (self._pixels, self._labels, self._rows):
                column[holes] = column[movers]
        self.size = kept
        return taken


class CacheLoader:
    """Batches of one split for one rank: the same number of steps on every rank, nothing dropped or doubled.

    Row group i belongs to rank i mod num_ranks. Ranks whose shard is shorter end with empty batches.
    """

    def __init__(
        self,
        url: str,
        manifest: CacheManifest,
        split: str,
        batch_size: int,
        *,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        pool_megabytes: int = 256,
        workers_count: int = 2,
    ) -> None:
        """Prepare to read; nothing is opened yet.

        Args:
            url: Folder or URL of the cache.
            manifest: What `open_cache` returned for it.
            split: train, val or test.
            batch_size: Pictures a step on this rank.
            seed: Shuffle, differently in each epoch, identically for the same seed; None keeps the order.
            rank: This rank.
            num_ranks: Number of ranks.
            pool_megabytes: Memory of the shuffle pool, from which a batch is drawn.
            workers_count: petastorm's reading threads.
        """
        self._split = manifest.splits[split]
        self._urls = [_file_url(url, file.name) for file in self._split.files]
        self.image_size = manifest.image_size
        self.batch_size = batch_size
        self._seed = seed
        self.rank = rank
        self._num_ranks = num_ranks
        self._workers_count = workers_count
        row_bytes = self.image_size**2 * 3
        held = min((pool_megabytes << 20) // row_bytes, self._split.rows + self._split.rows_per_group)
        # Room for one group more than is kept, and for a whole batch in any case.
        self._capacity = max(held, batch_size) + self._split.rows_per_group

    def rows_of(self, rank: int) -> int:
        """Return how many pictures the rank reads an epoch; padding lies in the last row group."""
        groups = self._split.row_groups
        own = len(range(rank, groups, self._num_ranks))
        has_last = own > 0 and (groups - 1) % self._num_ranks == rank
        return own * self._split.rows_per_group - (self._split.padding if has_last else 0)

    @property
    def num_steps(self) -> int:
        """Steps an epoch, the same on every rank."""
        return max(-(-self.rows_of(rank) // self.batch_size) for rank in range(self._num_ranks))

    def num_global_rows(self, step: int) -> int:
        """Return how many pictures all ranks together have in step `step` of an epoch."""
        begin = step * self.batch_size
        return sum(min(self.batch_size, max(0, self.rows_of(rank) - begin)) for rank in range(self._num_ranks))

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches of one epoch, exactly `num_steps` of them."""
        generator = None if self._seed is None else np.random.default_rng((self._seed, number, self.rank))
        pool = _ShufflePool(self._capacity, self.image_size**2 * 3, generator)
        steps = 0
        for pixels, labels, rows in self._row_groups(number):
            pool.add(pixels, labels, rows)
            while pool.size >= self.batch_size and pool.size + self._split.rows_per_group > pool.capacity:
                yield self._batch(pool, self.batch_size)
                steps += 1
        while steps < self.num_steps:
            yield self._batch(pool, min(self.batch_size, pool.size))
            steps += 1
        assert pool.size == 0, f"{pool.size} rows were left over"

    def _batch(self, pool: _ShufflePool, count: int) -> Batch:
        pixels, labels, rows = pool.draw(count)
        shape = (count, self.image_size, self.image_size, 3)
        return Batch(torch.from_numpy(pixels).view(shape), torch.from_numpy(labels), rows)

    def _row_groups(self, number: int) -> Iterator[tuple[list[bytes], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Read this rank's row groups with petastorm, padding left out."""
        if self.rank >= self._split.row_groups:
            return
        # A new reader each epoch: an old one repeats its order. The seed is above 0: petastorm takes 0 for none.
        with open_reader(
            self._urls,
            seed=None if self._seed is None else 1 + self._seed * 1_000_003 + number,
            rank=self.rank,
            # petastorm refuses more shards than row groups; with as many, row group i is rank i's all the same.
            num_ranks=min(self._num_ranks, self._split.row_groups),
            workers_count=self._workers_count,
        ) as reader:
            for group in reader:
                real = group.label != PADDING
                pixels = [picture for picture, keep in zip(group.pixels, real, strict=True) if keep]
                yield pixels, group.label[real], group.row[real]
