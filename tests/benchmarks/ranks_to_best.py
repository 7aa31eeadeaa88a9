"""Training on photos to a target accuracy: a single process, and two ranks with and without a scaled learning rate.

As steps 4 and 5 of the published recipe: a frozen backbone that runs on every image in every epoch, in one process and
in several. All use the same cores: the single process has a thread per core, each rank half as many. The target is the
best accuracy of the single process with the same seed, within 0.005. Needs the photos and weights of
$LAKEVISION_TEST_DATA.

Run: `make bench-ranks_to_best`; BENCH_ARGS=--quick for one seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BEGAN = time.perf_counter()
"""Start of the process: imports are part of the time."""

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import train_data
from tests.benchmarks.accuracy import seconds_to
from tests.benchmarks.figures import Figure, write_figures
from tests.benchmarks.peers import log_file

KINDS: dict[str, tuple[int | None, str]] = {
    "1 process": (None, "none"),
    "2 ranks, rate scaled": (2, "auto"),
    "2 ranks, rate not scaled": (2, "none"),
}
"""Number of ranks, and `train.scale_learning_rate`, of each kind."""
BACKEND = "torch"


def train(kind: str, folder: Path, weights: Path, seed: int) -> None:
    """Train, and print accuracy and seconds since the start of the process after each epoch, as JSON."""
    from tasks import tracking
    from tasks.cache.manifest import read_manifest
    from tasks.config.distributed import DistributedConfig
    from tasks.config.storage import StorageConfig
    from tasks.config.train import TrainConfig
    from tasks.launch.launcher import launch_ranks
    from tasks.refs import CacheRef
    from tasks.storage import resolve_storage
    from tasks.train.spec import TrainingSpec

    num_ranks, scaling = KINDS[kind]
    url = str(folder / "uint8")
    manifest = read_manifest(url)
    assert manifest is not None, "the benchmark has written the cache"
    storage = resolve_storage(StorageConfig(home=str(train_data.home_of(folder, seed))))
    config = TrainConfig.model_validate(
        {
            "model": "mobilenet_v2",
            "weights": str(weights),
            "seed": seed,
            "feature_cache": False,
            "scale_learning_rate": scaling,
        }
    )
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks, backend=BACKEND)

    def report(**values: float) -> None:
        print(json.dumps(values | {"at": time.perf_counter() - BEGAN}), flush=True)

    run = launch_ranks(
        TrainingSpec(
            train=config,
            distributed=distributed,
            cache=CacheRef(url=url, digest=manifest.digest),
            storage=storage,
        ),
        lambda event: report(epoch=event["epoch"], accuracy=event["val_accuracy"]),
    )
    report(test_accuracy=tracking.run_metrics(storage, run)["test_accuracy"])


def run_kind(kind: str, folder: Path, weights: Path, seed: int, log: Any) -> list[dict[str, float]]:
    """Train in a separate process, and return the rows that it printed."""
    command = [sys.executable, __file__, "--kind", kind, "--folder", str(folder), "--weights", str(weights)]
    done = subprocess.run(
        [*command, "--seed", str(seed)], stdout=subprocess.PIPE, stderr=log, text=True, check=True, cwd=ROOT
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(data: Path, folder: Path, num_seeds: int, log: Any) -> list[Figure]:
    """Train all kinds in turns, and return time, best accuracy and test accuracy of each beside the single process."""
    from tasks import tracking
    from tasks.config.storage import StorageConfig
    from tasks.storage import resolve_storage

    train_data.write_photos(data / "photos", folder)
    weights = data / "weights" / "mobilenet_v2.pth"
    rows: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in KINDS}
    for seed in range(1, num_seeds + 1):
        # Not timed: MLflow's database belongs to the home, and exists wherever a warm cache does.
        tracking.prepare_tracking(resolve_storage(StorageConfig(home=str(train_data.home_of(folder, seed)))))
        for kind in KINDS:
            found = run_kind(kind, folder, weights, seed, log)
            rows[kind].append(found)
            best = max(row.get("accuracy", 0.0) for row in found)
            print(
                f"seed {seed}, {kind}: {len(found) - 1} epochs in {found[-2]['at']:.0f} s, val {best:.4f}", flush=True
            )
    single = next(iter(KINDS))
    targets = [max(row.get("accuracy", 0.0) for row in run) for run in rows[single]]
    figures = []
    for kind in KINDS:
        seconds = statistics.median(seconds_to(run, target) for run, target in zip(rows[kind], targets, strict=True))
        peer = statistics.median(seconds_to(run, target) for run, target in zip(rows[single], targets, strict=True))
        best = [100 * max(row.get("accuracy", 0.0) for row in run) for run in rows[kind]]
        test = [100 * run[-1]["test_accuracy"] for run in rows[kind]]
        epochs = [float(len(run) - 1) for run in rows[kind]]
        beside = {
            "seconds to the target accuracy": (seconds, "s", peer),
            "best validation accuracy, mean": (statistics.mean(best), "%", 100 * statistics.mean(targets)),
            "test accuracy, mean": (
                statistics.mean(test),
                "%",
                100 * statistics.mean(run[-1]["test_accuracy"] for run in rows[single]),
            ),
            "epochs, mean": (statistics.mean(epochs), "", statistics.mean(float(len(run) - 1) for run in rows[single])),
        }
        figures += [
            Figure(f"{kind}: {name}", value, unit, single, other, value / other, None, None)
            for name, (value, unit, other) in beside.items()
        ]
    return figures


def main() -> None:
    """Train one kind, or run the benchmark and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed in place of three")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind:
        train(given.kind, given.folder, given.weights, given.seed)
        return
    if not (data := os.environ.get("LAKEVISION_TEST_DATA")):
        print("LAKEVISION_TEST_DATA is not set: nothing is measured", flush=True)
        return
    num_seeds = 1 if given.quick else 3
    with TemporaryDirectory() as scratch, log_file("ranks_to_best").open("w") as log:
        figures = compare(Path(data), Path(scratch), num_seeds, log)
    write_figures("ranks_to_best", figures, note=f"{num_seeds} seed(s) in turns, backend {BACKEND}")


if __name__ == "__main__":
    main()
