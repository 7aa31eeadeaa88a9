"""Suspected labels on photos of which some labels are flipped: precision of our ranking, beside cleanlab's scores.

Run: `make bench-label_errors`. Photos and weights are those of LAKEVISION_TEST_DATA.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np

from tasks.cache.manifest import open_cache
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.labels.confident import Probabilities, find_label_errors, probabilities_of_others
from tasks.labels.suspects import features_of_all
from tasks.storage import resolve_storage
from tasks.verdict.probe import Labels
from tests.benchmarks.calibration import cache_of
from tests.benchmarks.figures import Figure, data_with_photos, write_figures
from tests.benchmarks.peers import install_beside, log_file
from tests.benchmarks.verdict import splits_of

SIDE = 224
PRECISION = 80.0
"""Goal of the precision among as many images as labels were flipped, in percent."""

CLEANLAB = ("cleanlab==2.9.0", "termcolor")

SCORES = """
import sys, numpy as np
from cleanlab.rank import get_label_quality_scores
found = np.load(sys.argv[1])
for method in ("self_confidence", "normalized_margin"):
    scores = get_label_quality_scores(found["labels"], found["probabilities"], method=method)
    np.save(f"{sys.argv[2]}/{method}.npy", scores)
"""


def precision(scores_N: np.ndarray, is_flipped_N: np.ndarray) -> float:  # type: ignore[type-arg]  # float64 and bool
    """Return the share of flipped labels among as many of the lowest scores, in percent."""
    return float(100 * is_flipped_N[np.argsort(scores_N, kind="stable")[: is_flipped_N.sum()]].mean())


def ask_cleanlab(python: str, labels_N: Labels, probabilities_NK: Probabilities) -> dict[str, np.ndarray]:  # type: ignore[type-arg]  # float64
    """Return cleanlab's scores of labels by method."""
    with TemporaryDirectory() as scratch:
        np.savez(f"{scratch}/given.npz", labels=labels_N, probabilities=probabilities_NK)
        subprocess.run([python, "-c", SCORES, f"{scratch}/given.npz", scratch], check=True)
        return {file.stem: np.load(file) for file in sorted(Path(scratch).glob("*.npy"))}


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one draw, and without cleanlab")
    given = parser.parse_args()
    if (data := data_with_photos()) is None:
        return
    with TemporaryDirectory() as scratch:
        files = [file for file in (data / "photos").rglob("*") if file.is_file()]
        classes = sorted({file.parent.name for file in files})
        cache = cache_of(splits_of(files), classes, SIDE, Path(scratch))
        train = TrainConfig(model="mobilenet_v2", weights=f"{data}/weights/mobilenet_v2.pth", seed=1)
        storage = resolve_storage(StorageConfig(home=f"{scratch}/home"))
        features_NF, labels_N = features_of_all(train, cache, open_cache(cache), storage)
        with log_file("label_errors").open("w") as log:
            python = None if given.quick else install_beside(Path(scratch) / "cleanlab", CLEANLAB, "cleanlab", log)

        clean_NK = probabilities_of_others(features_NF, labels_N, len(classes), 0)
        mean_KK = np.array([clean_NK[labels_N == one].mean(axis=0) for one in range(len(classes))])
        confused_K = (mean_KK - np.eye(len(classes))).argmax(axis=1)
        figures = []
        for share in (0.05, 0.1):
            for kind in ("any class", "the class it is confused with most"):
                found: dict[str, list[float]] = {}
                for seed in range(1, 2 if given.quick else 6):
                    draw = np.random.default_rng(seed)
                    flipped = draw.choice(len(labels_N), round(share * len(labels_N)), replace=False)
                    wrong_N, is_flipped_N = labels_N.copy(), np.isin(np.arange(len(labels_N)), flipped)
                    others = (labels_N[flipped] + draw.integers(1, len(classes), len(flipped))) % len(classes)
                    wrong_N[flipped] = others if kind == "any class" else confused_K[labels_N[flipped]]
                    probabilities_NK = probabilities_of_others(features_NF, wrong_N, len(classes), 0)
                    errors = find_label_errors(probabilities_NK, wrong_N)
                    hits = int(is_flipped_N[errors.rows_S[: len(flipped)]].sum())
                    found.setdefault("ours", []).append(100 * hits / len(flipped))
                    found.setdefault("expected", []).append(errors.num_expected / len(flipped))
                    if python is not None:
                        for method, scores_N in ask_cleanlab(python, wrong_N, probabilities_NK).items():
                            found.setdefault(method, []).append(precision(scores_N, is_flipped_N))
                    print(f"  {share:.0%} to {kind}, draw {seed}: { ({name: own[-1] for name, own in found.items()}) }")
                ours, expected = (float(np.mean(found.pop(name))) for name in ("ours", "expected"))
                name, best = max(
                    ((key, float(np.mean(own))) for key, own in found.items()), key=lambda own: own[1], default=("", 0)
                )
                peer = f"cleanlab, {name}; {expected:.2f} of the flipped labels expected"
                what = f"precision, {share:.0%} flipped to {kind}"
                figures.append(Figure(what, ours, "%", peer, best, ours / best if best else 0, None, ours >= PRECISION))
    write_figures("label_errors", figures, f"{len(labels_N)} photos, {1 if given.quick else 5} draws; the goal is 80 %")


if __name__ == "__main__":
    main()
