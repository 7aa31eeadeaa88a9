"""Batches of a split, as its loaders read them."""

from tasks.cache.loader import Batch, CacheLoader
from tasks.cache.manifest import open_cache
from tasks.cache.order import VirtualRanks
from tasks.refs import CacheRef


def load(cache: CacheRef, batch_size: int = 4, rank: int = 0, num_ranks: int = 1, **options: int | None) -> CacheLoader:
    """Return a rank's loader of the split train."""
    ranks = VirtualRanks.of(rank, num_ranks)
    return CacheLoader(cache.url, open_cache(cache), "train", batch_size, ranks=ranks, **options)


def rows_of(batches: list[Batch]) -> list[int]:
    """Return the row numbers in reading order."""
    return [int(row) for batch in batches for row in batch.rows_B]


def read_ranks(cache: CacheRef, num_ranks: int, seed: int | None, epoch: int = 0) -> list[list[Batch]]:
    """Return the batches of one epoch, per rank."""
    return [list(load(cache, seed=seed, rank=rank, num_ranks=num_ranks).epoch(epoch)) for rank in range(num_ranks)]
