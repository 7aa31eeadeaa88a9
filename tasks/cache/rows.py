"""Single images of a cache and its number of images per class, read without reading an epoch."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import CacheManifest
from tasks.cache.write import PADDING
from tasks.object_store import file_system


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


def count_labels(url: str, manifest: CacheManifest, split: str) -> npt.NDArray[np.int64]:
    """Return the number of images of each class in a split, int64 (K,); padding is not counted."""
    filesystem, root = file_system(url)

    def read(name: str) -> npt.NDArray[np.int64]:
        with filesystem.open(f"{root}/{name}", "rb") as handle:
            labels = pq.read_table(handle, columns=["label"])["label"].to_numpy()
        found: npt.NDArray[np.int64] = labels[labels != PADDING]
        return found

    counts = np.zeros(len(manifest.classes), dtype=np.int64)
    with ThreadPoolExecutor(8) as pool:
        for labels in pool.map(read, [file.name for file in manifest.splits[split].files]):
            counts += np.bincount(labels, minlength=len(counts))
    return counts
