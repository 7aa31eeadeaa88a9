"""Calibration error on the split `test` with the fitted temperature, beside that without it, on photos and digits.

Each seed draws other splits and another start of the training. A perfectly calibrated model has an error above 0, too:
a bin of a few images has not exactly the accuracy of its probabilities. The note has this floor, simulated.

Run: `make bench-calibration`; BENCH_ARGS=--quick for two seeds. The photos need $LAKEVISION_TEST_DATA.
"""

import argparse
import hashlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from tasks.collectives.reducer import Reducer
from tasks.config.cache import CacheConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.etl.source import write_digits
from tasks.metrics.calibration import CalibrationSums
from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.decode import decode_pixels
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.tracking.runs import run_metrics
from tasks.tracking.trained import download_weights
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.benchmarks.figures import Figure, write_figures
from tests.builders.caches import write_cache

SIMULATIONS = 200
"""Number of simulated test splits for the error of a perfectly calibrated model."""


def splits_of(files: list[Path], seed: int) -> dict[str, list[Path]]:
    """Return the files of each split, 80 % train, 10 % val and 10 % test, in an order that depends on the seed."""
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}

    def draw(file: Path) -> bytes:
        # Without the folder, which is another one in each run.
        return hashlib.sha256(f"{seed}{file.parent.name}/{file.name}".encode()).digest()

    for file in sorted(files, key=draw):
        share = hashlib.sha256(f"{seed}".encode() + file.read_bytes()).digest()[0] / 256
        parts["val" if share < 0.1 else "test" if share < 0.2 else "train"].append(file)
    return parts


def floor_of(probabilities: list[float]) -> float:
    """Return the mean calibration error of predictions that are right with exactly these probabilities."""
    confidence = torch.tensor(probabilities, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _simulation in range(SIMULATIONS):
        sums = CalibrationSums(torch.device("cpu"))
        sums.add(confidence, torch.rand(len(confidence), generator=generator, dtype=torch.float64) < confidence)
        errors.append(sums.reduce(Reducer()).error)
    return statistics.mean(errors)


def cache_of(
    parts: Mapping[str, Sequence[Path]],
    classes: Sequence[str],
    side: int,
    folder: Path,
    label_of: Callable[[Path], int] | None = None,
) -> CacheRef:
    """Return a cache of image files by split; None gives each file the class of its folder."""

    def image(split: str, row: int) -> tuple[np.ndarray, int]:  # type: ignore[type-arg]  # uint8 (side, side, 3)
        file = parts[split][row]
        label = classes.index(file.parent.name) if label_of is None else label_of(file)
        return decode_pixels(file.read_bytes(), side), label

    rows = {split: len(part) for split, part in parts.items()}
    config = CacheConfig(image_size=side)
    return write_cache(str(folder / "cache"), rows, image, classes, config, rows_per_group=32, groups_per_file=64)


def train_once(source: Path, side: int, settings: dict[str, Any], seed: int, folder: Path) -> tuple[float, ...]:
    """Train on the images; return the error with and without the temperature, the floor, and the temperature."""
    files = sorted(file for file in source.rglob("*") if file.is_file())
    classes = sorted({file.parent.name for file in files})
    parts = splits_of(files, seed)

    cache = cache_of(parts, classes, side, folder)
    storage = resolve_storage(StorageConfig(home=str(folder / "home")))
    run = train_model(TrainingSpec(train=TrainConfig(seed=seed, **settings), cache=cache, storage=storage))
    metrics = run_metrics(storage, run)
    weights = download_weights(storage, run, folder)
    found = ImageClassifier.load(weights.parent).predict([file.read_bytes() for file in parts["test"]], top_k=1)
    floor = floor_of([one.probability for one in found if one.probability is not None])
    return (
        metrics["test_calibration_error"],
        metrics["test_calibration_error_uncalibrated"],
        floor,
        metrics["temperature"],
    )


def measure(name: str, source: Path, side: int, settings: dict[str, Any], num_seeds: int) -> tuple[Figure, str]:
    """Return the mean errors over the seeds, and a sentence about them."""
    rows = []
    for seed in range(1, num_seeds + 1):
        with TemporaryDirectory(prefix="lakevision-bench-") as folder:
            rows.append(train_once(source, side, settings, seed, Path(folder)))
        print(f"{name}, seed {seed}: {', '.join(f'{value:.4f}' for value in rows[-1])}", flush=True)
    after, before, floor, temperature = (statistics.mean(column) for column in zip(*rows, strict=True))
    figure = Figure(
        f"calibration error, {name}",
        100 * after,
        "%",
        "without the temperature",
        100 * before,
        after / before,
        goal=0.5,
        holds=after <= 0.5 * before,
    )
    return figure, f"{name}: mean temperature {temperature:.3f}, error of perfect calibration {100 * floor:.1f} %"


def main() -> None:
    """Measure on photos and digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds instead of ten")
    num_seeds = 2 if parser.parse_args().quick else 10
    figures, notes = [], []
    with TemporaryDirectory(prefix="lakevision-bench-") as folder:
        digits = Path(folder) / "digits"
        write_digits(digits)
        own = {"model": "resnet18", "weights": "none", "freeze_backbone": False, "max_epochs": 5, "batch_size": 32}
        given: dict[str, tuple[Path, int, dict[str, Any]]] = {"digits": (digits, 32, own)}
        data = os.environ.get("LAKEVISION_TEST_DATA")
        if data:
            frozen = {"recipe": "head", "model": "mobilenet_v2", "weights": f"{data}/weights/mobilenet_v2.pth"}
            given["photos"] = (Path(data) / "photos", 224, frozen)
        else:
            notes.append("photos: LAKEVISION_TEST_DATA is not set")
        for name, (source, side, settings) in given.items():
            figure, note = measure(name, source, side, settings, num_seeds)
            figures.append(figure)
            notes.append(note)
    write_figures("calibration", figures, f"{num_seeds} seeds; {'; '.join(notes)}")


if __name__ == "__main__":
    main()
