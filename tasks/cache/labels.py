"""Number of images per class in a split of a cache, read from its label column alone."""

from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tasks.cache.manifest import CacheManifest
from tasks.cache.write import PADDING


def count_labels(url: str, manifest: CacheManifest, split: str) -> npt.NDArray[np.int64]:
    """Return the number of images of each class in a split, int64 (K,); padding is not counted."""
    filesystem, root = fsspec.core.url_to_fs(url)

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
