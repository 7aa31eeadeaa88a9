"""What the loaders of a split read."""

from tasks.cache.loader import Batch, CacheLoader
from tasks.cache.manifest import open_cache
from tasks.refs import CacheRef


def load(cache: CacheRef, batch_size: int = 4, **how: int | None) -> CacheLoader:
    """Return a loader of the split train."""
    return CacheLoader(cache.url, open_cache(cache), "train", batch_size, **how)


def rows_of(batches: list[Batch]) -> list[int]:
    """Return the row numbers in the order they came."""
    return [int(row) for batch in batches for row in batch.rows_B]


def read_ranks(cache: CacheRef, num_ranks: int, seed: int | None, epoch: int = 0) -> list[list[Batch]]:
    """Return what each rank reads in one epoch."""
    return [list(load(cache, seed=seed, rank=rank, num_ranks=num_ranks).epoch(epoch)) for rank in range(num_ranks)]
