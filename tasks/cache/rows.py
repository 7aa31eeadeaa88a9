"""Single pictures and the label counts of a cache, for a report to a person: no epoch is read."""

from collections.abc import Sequence

import fsspec
import numpy as np
import pyarrow.parquet as pq
import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheManifest


def read_pictures(url: str, manifest: CacheManifest, split: str, rows: Sequence[int]) -> torch.Tensor:
    """Return the pictures of a few rows of a split, uint8 (len(rows), H, W, 3), in the order of `rows`.

    Raises:
        CacheDamaged: What is read is not what was written.
    """
    size = manifest.image_size
    pictures = torch.empty((len(rows), size, size, 3), dtype=torch.uint8)
    for place, row in enumerate(rows):
        # Of as many ranks as pictures are left from a position on, the first one reads exactly that picture.
        left = manifest.splits[split].rows - row
        loader = CacheLoader(url, manifest, split, 1, num_ranks=left, workers_count=1, pin_memory=False)
        for batch in loader.epoch(0, row):
            pictures[place] = batch.inputs[0]
    return pictures


def count_labels(url: str, manifest: CacheManifest, split: str) -> list[int]:
    """Return how many pictures of a split each class has, by the class's index; only the labels are read."""
    filesystem, root = fsspec.core.url_to_fs(url)
    counts = np.zeros(len(manifest.classes), dtype=np.int64)
    for file in manifest.splits[split].files:
        with filesystem.open(f"{root}/{file.name}", "rb") as handle:
            labels = pq.ParquetFile(handle, pre_buffer=True).read(columns=["label"])["label"].to_numpy()
        counts += np.bincount(labels[labels >= 0], minlength=len(counts))  # padding is labelled -1
    return [int(count) for count in counts]
