"""Accuracy on the split `test` beside that on photos of other objects, with bursts split at random and by groups.

A burst is five crops of one photo, with small rotations and other light. Ten photos of each class are bursts, others
are the objects that no split has. ETL makes the splits: random, by a pattern, or by near-duplicates. The classifier is
a linear probe of the frozen backbone, fitted on the split `train`.

Run: `make bench-groups`; BENCH_ARGS=--quick for one seed. It needs $LAKEVISION_TEST_DATA.
"""

import argparse
import os
import random
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torchvision
from PIL import Image, ImageEnhance
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.etl.ingest import ingest_images
from tasks.etl.validate import measure_tables
from tasks.spark.session import keep_spark
from tasks.storage import resolve_storage
from tests.benchmarks.figures import Figure, write_figures
from tests.benchmarks.linear_probe import features_of, letterboxed
from tests.builders.delta_rows import local_rows

BURST = 5
"""Number of images of a burst."""

CORNERS = 0.02
"""Part that is cut off at each side, with the corners that the rotation leaves empty."""

MAX_CROP, MAX_DEGREES, MAX_LIGHT = 0.03, 2.0, 0.15
"""Largest further part that is cut off at a side, rotation, and change of brightness."""

NUM_OBJECTS = 10
"""Number of bursts of a class."""

NUM_OTHERS = 20
"""Maximum number of photos of other objects of a class."""

REPORTED_BITS = 8
"""Distance of the pairs of images in different splits that are counted."""

SPLITS: dict[str, dict[str, Any]] = {
    "random splits": {},
    "groups by pattern": {"split_group": {"by": "pattern", "pattern": r"(object\d+)_"}},
    "near-duplicates, 3 bits": {"split_group": {"by": "near_duplicates"}},
    "near-duplicates, 8 bits": {"split_group": {"by": "near_duplicates"}, "near_duplicate_bits": 8},
}


def variant(photo: Image.Image, rng: random.Random) -> Image.Image:
    """Return a crop of a rotated photo in another light."""
    photo = photo.rotate(rng.uniform(-MAX_DEGREES, MAX_DEGREES), Image.Resampling.BICUBIC)
    margins = [CORNERS + rng.uniform(0, MAX_CROP) for _side in range(4)]
    width, height = photo.size
    box = (margins[0] * width, margins[1] * height, (1 - margins[2]) * width, (1 - margins[3]) * height)
    cropped = photo.crop(tuple(round(edge) for edge in box))  # type: ignore[arg-type]  # four values
    return ImageEnhance.Brightness(cropped).enhance(1 + rng.uniform(-MAX_LIGHT, MAX_LIGHT))


def write_bursts(photos: Path, folder: Path, seed: int) -> list[Path]:
    """Write the bursts below a folder; return the photos of other objects."""
    others = []
    rng = random.Random(seed)
    for number, label in enumerate(sorted(path.name for path in photos.iterdir() if path.is_dir())):
        files = sorted((photos / label).iterdir())
        rng.shuffle(files)
        (folder / label).mkdir(parents=True)
        for at, file in enumerate(files[:NUM_OBJECTS]):
            photo = Image.open(file).convert("RGB")
            for image in range(BURST):
                name = f"object{number * NUM_OBJECTS + at}_{image}.jpg"
                variant(photo, rng).save(folder / label / name, quality=95)
        others += files[NUM_OBJECTS : NUM_OBJECTS + NUM_OTHERS]
    return others


def split_files(source: Path, settings: dict[str, Any], seed: int, home: Path) -> tuple[dict[str, str], int]:
    """Return the split by path that ETL makes, and the number of near-duplicates in different splits."""
    storage = resolve_storage(StorageConfig(home=str(home)))
    etl = EtlConfig(source=str(source), test_fraction=0.2, split_seed=seed, **settings)
    report = ingest_images(etl, storage, SparkConfig())
    counted = measure_tables(None, report, etl.model_copy(update={"near_duplicate_bits": REPORTED_BITS}), storage)
    rows = local_rows(storage.table("files"), "path", "split").to_pylist()
    return {row["path"]: row["split"] for row in rows}, counted.near_duplicates


def measure(data: Path, seed: int, folder: Path) -> dict[str, tuple[float, float, int]]:
    """Return, by name of the splits, both accuracies and the number of near-duplicates in different splits."""
    source = folder / "bursts"
    others = write_bursts(data / "photos", source, seed)
    backbone = torchvision.models.mobilenet_v2(weights=None)
    backbone.load_state_dict(torch.load(data / "weights" / "mobilenet_v2.pth", weights_only=True))
    backbone.classifier = torch.nn.Identity()
    backbone.eval()
    files = sorted(source.rglob("*.jpg"))
    features, labels = features_of(files, backbone, letterboxed), np.array([file.parent.name for file in files])
    other_features, other_labels = features_of(others, backbone, letterboxed), [file.parent.name for file in others]
    found = {}
    for number, (name, settings) in enumerate(SPLITS.items()):
        split_of, pairs = split_files(source, settings, seed, folder / f"home-{number}")
        splits = np.array([split_of[file.relative_to(source).as_posix()] for file in files])
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        model.fit(features[splits == "train"], labels[splits == "train"])
        claimed = float(model.score(features[splits == "test"], labels[splits == "test"]))
        found[name] = (claimed, float(model.score(other_features, other_labels)), pairs)
        print(f"seed {seed}, {name}: test {claimed:.4f}, others {found[name][1]:.4f}, pairs {pairs}", flush=True)
    return found


def main() -> None:
    """Measure on bursts of the photos."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed instead of three")
    seeds = range(1, 2 if parser.parse_args().quick else 4)
    if not (data := os.environ.get("LAKEVISION_TEST_DATA")):
        print("nothing is measured: LAKEVISION_TEST_DATA is not set")
        return
    with keep_spark():
        found = []
        for seed in seeds:
            with TemporaryDirectory(prefix="lakevision-bench-") as folder:
                found.append(measure(Path(data), seed, Path(folder)))
    figures, pairs = [], []
    for name in SPLITS:
        columns = zip(*(of_seed[name] for of_seed in found), strict=True)
        claimed, true, across = (statistics.mean(column) for column in columns)
        peer = ("photos of other objects", 100 * true, claimed / true)
        figures.append(Figure(f"test accuracy, {name}", 100 * claimed, "%", *peer, goal=None, holds=None))
        pairs.append(f"{across:.0f}")
    bursts = f"40 classes of {NUM_OBJECTS} bursts of {BURST} images, and up to {NUM_OTHERS} other objects"
    counted = f"pairs within {REPORTED_BITS} bits in different splits: {', '.join(pairs)}"
    number = "1 seed" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    write_figures("groups", figures, f"{bursts}; {number}. In the order of the rows, {counted}")


if __name__ == "__main__":
    main()
