"""Verdicts from a quarter of the images, beside the test accuracy of a head that is trained on all of them.

Each set has one test split, which is held out from all draws, and a frozen mobilenet_v2 with its weights. The sets are
the photos, the photos with a tenth of the labels wrong, and handwritten digits, on which the weights were not trained.
The peer of the expected accuracy is that of the probe on the quarter itself. Needs the photos and weights of
$LAKEVISION_TEST_DATA.

Run: `make bench-verdict`; BENCH_ARGS=--quick for two draws.
"""

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np

from tasks.cache.manifest import open_cache
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.etl.source import write_digits
from tasks.storage import resolve_storage
from tasks.tracking.runs import run_metrics
from tasks.train.features import materialize_features, read_features
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tasks.verdict.judge import MAX_IMAGES, as_in_training
from tasks.verdict.outlook import make_verdict
from tasks.verdict.probe import Features, Labels, judge, stratified_order
from tests.benchmarks.calibration import cache_of
from tests.benchmarks.figures import Figure, write_figures

SIDE, SHARE = 224, 0.25
TEST, VAL = 0.2, 0.1
"""Fractions of the splits test and val."""

MAX_POINTS = 10.0
"""Goal of the width of an interval, in points."""


def order(name: str, salt: str = "") -> bytes:
    """Return a key that sorts names in a fixed random order."""
    return hashlib.sha256(f"{salt}{name}".encode()).digest()


def splits_of(files: list[Path]) -> dict[str, list[Path]]:
    """Return the files of each split, stratified by class folder."""
    by_class: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(files, key=lambda file: order(f"{file.parent.name}/{file.name}")):
        by_class[file.parent.name].append(file)
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for own in by_class.values():
        num_test, num_val = round(TEST * len(own)), round(VAL * len(own))
        parts["test"] += own[:num_test]
        parts["val"] += own[num_test : num_test + num_val]
        parts["train"] += own[num_test + num_val :]
    return {
        split: sorted(part, key=lambda file: order(f"{file.parent.name}/{file.name}", "rows"))
        for split, part in parts.items()
    }


def train_on_all(
    source: Path, wrong_labels: float, weights: Path, folder: Path
) -> tuple[Features, Labels, dict[str, int], float, list[str]]:
    """Train a head on all images; return features and labels of train and val, sizes, test accuracy and classes."""
    files = [file for file in source.rglob("*") if file.is_file()]
    classes, parts = sorted({file.parent.name for file in files}), splits_of(files)

    def label_of(file: Path) -> int:
        drawn = order(f"{file.parent.name}/{file.name}", "labels")
        if drawn[0] / 256 < wrong_labels:
            return int.from_bytes(drawn[1:5]) % len(classes)
        return classes.index(file.parent.name)

    cache = cache_of(parts, classes, SIDE, folder, label_of)
    storage = resolve_storage(StorageConfig(home=str(folder / "home")))
    train = TrainConfig(recipe="head", model="mobilenet_v2", weights=str(weights), seed=1)
    run = train_model(TrainingSpec(train=train, cache=cache, storage=storage))
    accuracy = run_metrics(storage, run)["test_accuracy"]
    with as_in_training(train, cache, open_cache(cache), storage) as (context, _phase, _batch):
        features_NF, labels_N = read_features(*materialize_features(context, ("train", "val")), train.seed, MAX_IMAGES)
    return features_NF.numpy(), labels_N.numpy(), {split: len(part) for split, part in parts.items()}, accuracy, classes


def measure(
    name: str, source: Path, wrong_labels: float, weights: Path, num_draws: int, *, has_goal: bool
) -> tuple[list[Figure], str]:
    """Return the figures of a set of images, and a sentence about it."""
    with TemporaryDirectory(prefix="lakevision-bench-") as folder:
        features_NF, labels_N, sizes, truth, classes = train_on_all(source, wrong_labels, weights, Path(folder))
    covered, widths, errors, naive = 0, [], [], []
    for draw in range(num_draws):
        rows = stratified_order(labels_N, np.random.default_rng(draw))[: round(SHARE * len(labels_N))]
        verdict, _ = make_verdict(
            judge(features_NF[rows], labels_N[rows], draw), classes, sizes["train"], sizes["test"], None, draw
        )
        assert verdict.interval is not None
        assert verdict.accuracy is not None
        low, high = verdict.interval
        covered += low <= truth <= high
        widths.append(100 * (high - low))
        errors.append(100 * abs(verdict.accuracy - truth))
        naive.append(100 * abs(verdict.curve[-1][1] - truth))
        print(f"{name}, draw {draw}: {low:.4f} to {high:.4f}, expected {verdict.accuracy:.4f}, {truth:.4f}", flush=True)
    began = time.process_time()
    in_full = judge(features_NF, labels_N, 1)
    seconds = time.process_time() - began
    probe = 1 - in_full.wrong_RSN[:, -1].mean()
    close, off = statistics.mean(errors), statistics.mean(naive)
    figures = [
        Figure(
            f"draws whose interval covers the accuracy, {name}",
            covered,
            "",
            "all draws",
            num_draws,
            covered / num_draws,
            goal=0.9,
            holds=covered >= 0.9 * num_draws,
        ),
        Figure(
            f"widest interval, {name}",
            max(widths),
            "points",
            "the most that is useful",
            MAX_POINTS,
            max(widths) / MAX_POINTS,
            goal=1.0 if has_goal else None,
            holds=max(widths) <= MAX_POINTS if has_goal else None,
        ),
        Figure(
            f"mean error of the expected accuracy, {name}",
            close,
            "points",
            "accuracy on the quarter",
            off,
            close / off,
            goal=None,
            holds=None,
        ),
    ]
    return figures, (
        f"{name.capitalize()}: test accuracy {truth:.4f} of {sizes['test']} images after training on {sizes['train']}, "
        f"probe {probe:.4f}, {seconds:.0f} CPU s of the probes on all"
    )


def main() -> None:
    """Measure on photos, photos with wrong labels, and digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two draws instead of ten")
    num_draws = 2 if parser.parse_args().quick else 10
    data = os.environ.get("LAKEVISION_TEST_DATA")
    if not data:
        print("LAKEVISION_TEST_DATA is not set: nothing to measure")
        return
    weights, photos = Path(data) / "weights" / "mobilenet_v2.pth", Path(data) / "photos"
    figures, notes = [], []
    with TemporaryDirectory(prefix="lakevision-bench-") as folder:
        digits = Path(folder) / "digits"
        write_digits(digits)
        for name, source, wrong_labels in (
            ("photos", photos, 0.0),
            ("digits", digits, 0.0),
            ("photos, a tenth of the labels wrong", photos, 0.1),
        ):
            found, note = measure(name, source, wrong_labels, weights, num_draws, has_goal=wrong_labels == 0)
            figures += found
            notes.append(note)
    write_figures("verdict", figures, f"{num_draws} draws of a quarter. {'. '.join(notes)}")


if __name__ == "__main__":
    main()
