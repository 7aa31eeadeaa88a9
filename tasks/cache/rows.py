"""Single images of a cache, for reports, read without reading an epoch."""

from collections.abc import Sequence

import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheManifest


def read_images(url: str, manifest: CacheManifest, split: str, rows: Sequence[int]) -> torch.Tensor:
    """Return the images of a few rows of a split, uint8 (len(rows), H, W, 3), in the order of `rows`.

    Raises:
        CacheDamaged: The rows that were read are not those that were written.
    """
    size = manifest.image_size
    images = torch.empty((len(rows), size, size, 3), dtype=torch.uint8)
    for place, row in enumerate(rows):
        # With as many ranks as images remain from a position, the first rank reads exactly the image at it.
        left = manifest.splits[split].rows - row
        loader = CacheLoader(url, manifest, split, 1, num_ranks=left, workers_count=1, pin_memory=False)
        for batch in loader.epoch(0, row):
            images[place] = batch.inputs[0]
    return images
