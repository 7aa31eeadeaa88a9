"""Training on photos to a target accuracy: a single process, and two ranks with and without a scaled learning rate.

As steps 4 and 5 of the published recipe: a frozen backbone that runs on every image in every epoch, in one process and
in several. All use the same cores: the single process has a thread per core, each rank half as many. The target is the
best accuracy of the single process with the same seed. Needs the photos and weights of $LAKEVISION_TEST_DATA.

Run: `make bench-ranks_to_best`; BENCH_ARGS=--quick for one seed.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.config.storage import StorageConfig
from tasks.storage import resolve_storage
from tasks.tracking.server import prepare_tracking
from tests.benchmarks import train_data
from tests.benchmarks.accuracy import WITHIN, run_to_best, seconds_to
from tests.benchmarks.figures import Figure, write_figures
from tests.benchmarks.peers import log_file
from tests.benchmarks.train_to_best import BACKEND

KINDS = {"process": "1 process", "ranks-scaled": "2 ranks, rate scaled", "ranks-unscaled": "2 ranks, rate not scaled"}
"""Titles of the runs of `train_to_best.py`; the others are compared with the first."""

Rows = list[dict[str, float]]
"""What a run printed: a row per epoch, and one with the test accuracy."""


def best_of(rows: Rows) -> float:
    """Return the best validation accuracy of a run."""
    return max(row.get("accuracy", 0.0) for row in rows)


def train_all(data: Path, folder: Path, num_seeds: int, log: Any) -> dict[str, list[Rows]]:
    """Train all kinds in turns, with each seed."""
    train_data.write_photos(data / "photos", folder)
    weights = data / "weights" / "mobilenet_v2.pth"
    runs: dict[str, list[Rows]] = {kind: [] for kind in KINDS}
    for seed in range(1, num_seeds + 1):
        # Not timed: MLflow's database belongs to the home, and exists wherever a warm cache does.
        prepare_tracking(resolve_storage(StorageConfig(home=str(train_data.home_of(folder, seed)))))
        for kind, title in KINDS.items():
            rows = run_to_best(kind, folder, weights, seed, log)
            runs[kind].append(rows)
            seconds = rows[-2]["at"]
            print(
                f"seed {seed}, {title}: {len(rows) - 1} epochs in {seconds:.0f} s, val {best_of(rows):.4f}", flush=True
            )
    return runs


def summarize(runs: list[Rows], targets: list[float]) -> dict[tuple[str, str], float]:
    """Return the figures of a kind by title and unit."""
    pairs = zip(runs, targets, strict=True)
    return {
        ("to the target accuracy, median", "s"): statistics.median(seconds_to(rows, target) for rows, target in pairs),
        ("best validation accuracy, mean", "%"): 100 * statistics.mean(map(best_of, runs)),
        ("test accuracy, mean", "%"): 100 * statistics.mean(rows[-1]["test_accuracy"] for rows in runs),
        ("epochs, mean", "epochs"): statistics.mean(len(rows) - 1.0 for rows in runs),
    }


def compare(runs: dict[str, list[Rows]]) -> list[Figure]:
    """Return the figures of each kind of several ranks beside those of the single process."""
    single, *others = KINDS
    targets = [best_of(rows) for rows in runs[single]]
    peer = summarize(runs[single], targets)
    return [
        Figure(
            f"{KINDS[kind]}: {title}",
            value,
            unit,
            KINDS[single],
            peer[title, unit],
            value / peer[title, unit],
            None,
            None,
        )
        for kind in others
        for (title, unit), value in summarize(runs[kind], targets).items()
    ]


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed in place of three")
    num_seeds = 1 if parser.parse_args().quick else 3
    if not (data := os.environ.get("LAKEVISION_TEST_DATA")):
        print("LAKEVISION_TEST_DATA is not set: nothing is measured", flush=True)
        return
    with TemporaryDirectory() as scratch, log_file("ranks_to_best").open("w") as log:
        figures = compare(train_all(Path(data).resolve(), Path(scratch), num_seeds, log))
    note = f"target within {WITHIN}, {num_seeds} seed(s) in turns, backend {BACKEND}"
    write_figures("ranks_to_best", figures, note)


if __name__ == "__main__":
    main()
