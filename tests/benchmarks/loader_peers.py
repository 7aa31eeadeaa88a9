"""A loader in a separate process: runs an epoch per line on stdin, and prints its time on stdout.

Run by tests/benchmarks/loader.py as `loader_peers.py NAME FOLDER`; the line `go` starts an epoch.
"""

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

BATCH_SIZE = 32
NUM_WORKERS = 2
SEED = 1

Epoch = Callable[[int], Iterable[torch.Tensor]]
"""A function from the number of an epoch to its batches of pixels, uint8."""


def cache(folder: Path, pixel_format: str, pool_megabytes: int = 256) -> Epoch:
    """Return our loader, opened in each epoch with the checks of a training run."""
    from tasks.cache.loader import CacheLoader
    from tasks.cache.manifest import open_cache, read_manifest
    from tasks.refs import CacheRef

    url = str(folder / pixel_format)
    manifest = read_manifest(url)
    assert manifest is not None
    ref = CacheRef(url=url, digest=manifest.digest)
    loader = CacheLoader(
        url, manifest, "train", BATCH_SIZE, seed=SEED, pool_megabytes=pool_megabytes, workers_count=NUM_WORKERS
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        open_cache(ref)
        for batch in loader.epoch(number):
            yield batch.inputs

    return epoch


def recipe(folder: Path) -> Epoch:
    """Return petastorm's own loader with its default arguments, JPEG decoded in a TransformSpec."""
    from tests.benchmarks.recipe import read_recipe

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for batch in read_recipe(folder / "recipe", BATCH_SIZE, 1 + number):
            yield batch["pixels"]

    return epoch


def torch_loader(dataset: Any, *, shuffle: bool) -> Epoch:
    """Return torch's DataLoader with persistent workers."""
    loader = torch.utils.data.DataLoader(
        dataset, BATCH_SIZE, shuffle=shuffle, num_workers=NUM_WORKERS, persistent_workers=True
    )
    return lambda number: (batch[0] for batch in loader)


def image_folder(folder: Path) -> Epoch:
    """Return torchvision's ImageFolder under a DataLoader."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    return torch_loader(ImageFolder(str(folder / "files"), transform=PILToTensor()), shuffle=True)


def streaming(folder: Path, pixel_format: str) -> Epoch:
    """Return MosaicML's StreamingDataset, which shuffles itself, under a DataLoader."""
    from streaming import StreamingDataset
    from torchvision.transforms.functional import pil_to_tensor

    class Images(StreamingDataset):  # type: ignore[misc]  # no types
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            row = super().__getitem__(index)
            pixels = row["pixels"]
            return torch.from_numpy(pixels) if pixel_format == "raw" else pil_to_tensor(pixels), row["label"]

    return torch_loader(
        Images(local=str(folder / "mds" / pixel_format), shuffle=True, batch_size=BATCH_SIZE), shuffle=False
    )


def gather(folder: Path) -> Epoch:
    """Return a gather with np.take from pixels in memory into one batch, the upper bound of every loader."""
    from tests.benchmarks.loader_data import draw_image

    num_rows = json.loads((folder / "rows.json").read_text())
    pixels = np.stack([draw_image(row) for row in range(num_rows)])

    batch = np.empty((BATCH_SIZE, *pixels.shape[1:]), dtype=np.uint8)

    def epoch(number: int) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(number).permutation(num_rows)
        for begin in range(0, num_rows, BATCH_SIZE):
            chosen = order[begin : begin + BATCH_SIZE]
            # Mode clip: in the default mode, numpy gathers into a temporary buffer first.
            yield torch.from_numpy(np.take(pixels, chosen, axis=0, out=batch[: len(chosen)], mode="clip"))

    return epoch


PEERS: dict[str, Callable[[Path], Epoch]] = {
    "uint8": lambda folder: cache(folder, "uint8"),
    "jpeg": lambda folder: cache(folder, "jpeg"),
    "small_pool": lambda folder: cache(folder, "uint8", pool_megabytes=64),
    "recipe": recipe,
    "image_folder": image_folder,
    "streaming_jpeg": lambda folder: streaming(folder, "jpeg"),
    "streaming_raw": lambda folder: streaming(folder, "raw"),
    "gather": gather,
}


def run_epoch(epoch: Epoch, number: int) -> dict[str, float]:
    """Return the number of images, the seconds to the first batch and the total seconds, opening included."""
    began = time.perf_counter()
    first, images = 0.0, 0
    for batch in epoch(number):
        first = first or time.perf_counter() - began
        images += len(batch)
        batch[0].max()  # Read one image, in case a batch is lazy.
    return {"images": images, "first": first, "seconds": time.perf_counter() - began}


def main() -> None:
    """Run an epoch per line on stdin; each answer has the growth of the peak memory, in MB."""
    warnings.filterwarnings("ignore")
    name, folder = sys.argv[1], Path(sys.argv[2])
    epoch = PEERS[name](folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = sys.stdout
    sys.stdout = sys.stderr  # petastorm prints when a reader is closed
    for number, _line in enumerate(sys.stdin):
        answer = run_epoch(epoch, number)
        answer["grown"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
