"""A training run to its best validation accuracy, which prints accuracy and time per epoch.

Run by tests/benchmarks/accuracy.py and ranks_to_best.py as `train_to_best.py NAME FOLDER WEIGHTS SEED`. NAME is one of
OURS, recipe-1 or recipe-3.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
"""Start of the process: imports are part of the time."""

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

BACKEND = "torch"
"""Backend of the ranks."""

OURS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "ours": (None, {}),
    # The backbone runs on every image in every epoch, as in the recipe.
    "process": (None, {"feature_cache": False, "scale_learning_rate": "none"}),
    "ranks-scaled": (2, {"feature_cache": False, "scale_learning_rate": "auto"}),
    "ranks-unscaled": (2, {"feature_cache": False, "scale_learning_rate": "none"}),
}
"""Number of ranks, None for a single process, and settings other than the default ones, by name."""

answers = sys.stdout
"""The output that the benchmark reads; petastorm prints to `sys.stdout`."""


def report(**values: float) -> None:
    """Print values as JSON, with the seconds since the start as `at`."""
    print(json.dumps(values | {"at": time.perf_counter() - BEGAN}), file=answers, flush=True)


def ours(name: str, folder: Path, weights: Path, seed: int) -> None:
    """Train with the settings of a name and tracking, from a cache without cached features."""
    from tasks.cache.manifest import read_manifest
    from tasks.config.distributed import DistributedConfig
    from tasks.config.storage import StorageConfig
    from tasks.config.train import TrainConfig
    from tasks.launch.launcher import launch_ranks
    from tasks.refs import CacheRef
    from tasks.storage import resolve_storage
    from tasks.tracking.runs import run_metrics
    from tasks.train.spec import TrainingSpec
    from tests.benchmarks import train_data

    num_ranks, settings = OURS[name]
    url = str(folder / "uint8")
    manifest = read_manifest(url)
    assert manifest is not None
    storage = resolve_storage(StorageConfig(home=str(train_data.home_of(folder, seed))))
    run = launch_ranks(
        TrainingSpec(
            train=TrainConfig(recipe="head", model="mobilenet_v2", weights=str(weights), seed=seed, **settings),
            distributed=None if num_ranks is None else DistributedConfig(num_ranks=num_ranks, backend=BACKEND),
            cache=CacheRef(url=url, digest=manifest.digest),
            storage=storage,
        ),
        lambda event: report(epoch=event["epoch"], accuracy=event["val_accuracy"]),
    )
    report(test_accuracy=run_metrics(storage, run)["test_accuracy"])


def recipe(folder: Path, weights: Path, seed: int, step: int) -> None:
    """Train like the published recipe: its loader, and the frozen backbone on every image in every epoch, float32."""
    import torchvision
    from torch import nn

    from tests.benchmarks.recipe import read_recipe

    # Step 1: batch 2, 60 epochs, of which two run here. Step 3: batch 16, early stopping, dropout 0.5.
    batch_size, max_epochs, patience, rate, dropout = (2, 2, 60, 0.001, 0.0) if step == 1 else (16, 60, 3, 0.004, 0.5)
    torch.manual_seed(seed)
    classes = json.loads((folder / "classes.json").read_text())
    model = torchvision.models.mobilenet_v2(weights=None)
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.requires_grad_(False)
    model.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, len(classes)))
    optimizer = torch.optim.Adam(model.classifier.parameters(), lr=rate)
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def batches(split: str, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in read_recipe(folder / "recipe" / split, batch_size, seed + epoch):
            pixels = batch["pixels"].permute(0, 3, 1, 2).float().div(255)
            yield pixels.sub(mean).div(std), batch["label"]

    best, waited = 0.0, 0
    for epoch in range(1, max_epochs + 1):
        model.eval()
        model.classifier.train()
        for pixels, labels in batches("train", epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()
        model.eval()
        correct = count = 0
        with torch.no_grad():
            for pixels, labels in batches("val", 0):
                correct += int((model(pixels).argmax(1) == labels).sum())
                count += len(labels)
        report(epoch=epoch, accuracy=correct / count)
        best, waited = (correct / count, 0) if correct / count > best else (best, waited + 1)
        if waited >= patience:
            break


def main() -> None:
    """Train by the name in the first argument."""
    warnings.filterwarnings("ignore")
    name, folder, weights, seed = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    from tasks.system.cores import num_cores

    torch.set_num_threads(num_cores())
    if name in OURS:
        ours(name, folder, weights, seed)
    else:
        sys.stdout = sys.stderr  # petastorm prints when a reader is closed
        recipe(folder, weights, seed, int(name.rsplit("-", 1)[1]))


if __name__ == "__main__":
    main()
