"""Test accuracy of the default recipe beside fastai, timm's arguments and a linear probe, from the same weights.

Sets are made of the photos of $LAKEVISION_TEST_DATA: ten images of each class, classes of 30:1, a tenth of the labels
wrong, and all of them. All sides have the same splits. fastai trains for 5 epochs with its own defaults, with the first
seed of the first set also for 10 and 20. Ours and timm have the time of 5, ours for ETL, cache and training with the
test. The time of a peer begins after its imports.

Run: `make bench-quality`; BENCH_ARGS=--quick for one seed and ten images of each class. All of it takes hours: the
runs are written to quality-runs.jsonl, and BENCH_ARGS=--resume does not repeat those of an earlier call.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.figures import Figure, data_with_photos, write_figures
from tests.benchmarks.peers import install_beside, log_file

FASTAI = (
    *("fastai==2.8.4", "fastcore==1.8.7", "fastprogress<1.1", "fasttransform==0.0.2"),
    *("plum-dispatch", "fastdownload", "beartype"),
)
"""fastai, with the packages that it needs beside ours."""

EPOCHS = (5, 10, 20)

Runs = dict[tuple[str, int, str], dict[str, float]]
"""Accuracy and seconds by set, seed and side."""

Rows = dict[str, list[tuple[Path, str]]]
"""Files and class names by split."""


def ten_images(files: list[Path], _number: int, _count: int) -> dict[str, list[Path]]:
    """Return ten images of a class, two of them for `val`, and twenty for the test."""
    return {"train": files[:8], "val": files[8:10], "test": files[10:30]}


def unequal(files: list[Path], number: int, count: int) -> dict[str, list[Path]]:
    """Return 30 images of the first class to one of the last, an eighth as many for `val`, and fifteen for the test."""
    size = max(1, round(30 ** (1 - number / (count - 1))))
    num_val = max(1, round(size / 8)) if size > 1 else 0
    others = files[:-15]  # A class of 31 images has fewer than 30 of them.
    return {"train": others[:size], "val": others[size : size + num_val], "test": files[-15:]}


def whole(files: list[Path], _number: int, _count: int) -> dict[str, list[Path]]:
    """Return all images of a class: 80, 10 and 10 %."""
    tenth = round(len(files) / 10)
    return {"test": files[:tenth], "val": files[tenth : 2 * tenth], "train": files[2 * tenth :]}


SETS: dict[str, tuple[Callable[..., dict[str, list[Path]]], float]] = {
    "ten images of each class": (ten_images, 0.0),
    "classes of 30:1": (unequal, 0.0),
    "a tenth of the labels wrong": (ten_images, 0.1),
    "all photos": (whole, 0.0),
}
"""Choice of images, and share of wrong labels in train and val."""


def write_set(photos: Path, folder: Path, name: str, seed: int) -> None:
    """Write a set as links in folders SPLIT/CLASS."""
    choose, wrong = SETS[name]
    draw = np.random.default_rng(seed)
    classes = sorted(path.name for path in photos.iterdir() if path.is_dir())
    for number, place in enumerate(draw.permutation(len(classes)).tolist()):
        files = sorted((photos / classes[place]).iterdir())
        shuffled = [files[index] for index in draw.permutation(len(files))]
        for split, chosen in choose(shuffled, number, len(classes)).items():
            for file in chosen:
                is_wrong = split != "test" and draw.random() < wrong
                label = classes[draw.integers(len(classes))] if is_wrong else classes[place]
                link = folder / split / label / f"{classes[place]}-{file.name}"
                link.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, link)


def run_ours(folder: Path, weights: Path, seconds: float, seed: int, log: Any) -> dict[str, float]:
    """Run the DAG on a set with this budget; return accuracy and seconds."""
    with TemporaryDirectory() as home:
        began = time.perf_counter()
        command = [
            *(sys.executable, "-m", "flows.pipeline", "--source", str(folder), "--weights", str(weights)),
            *(
                "--etl.split_by",
                "folder",
                "--train.seed",
                str(seed),
                "--train.max_seconds",
                str(max(1, round(seconds))),
            ),
            *("--storage.home", home),
        ]
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
        summary = json.loads((Path(home) / "summary.json").read_text())
        print(f"    DAG with inference {time.perf_counter() - began:.0f} s", flush=True)
    stages = summary["seconds"]
    spent = sum(stages[name] for name in ("etl", "cache", "train") if name in stages)
    return {"accuracy": summary["test_accuracy"], "seconds": spent}


def run_peer(python: str, name: str, folder: Path, weights: Path, seed: int, log: Any) -> dict[str, float]:
    """Run a peer on a set; return accuracy and seconds."""
    script = str(ROOT / "tests/benchmarks/quality_peers.py")
    command = [python, script, name, str(folder), str(weights), str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def interval(differences: list[float]) -> str:
    """Return the mean of paired differences in points, with the 95 % interval of Student's t."""
    mean = 100 * statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.1f} points, one seed"
    from scipy.stats import t

    half = 100 * statistics.stdev(differences) / len(differences) ** 0.5 * t.ppf(0.975, len(differences) - 1)
    return f"{mean:+.1f} ± {half:.1f} points"


def read_runs(file: Path) -> Runs:
    """Return the runs that are in a file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(line["set"], line["seed"], line["side"]): line["result"] for line in lines}


def compare(
    data: Path, name: str, num_seeds: int, fastai: str | None, epochs: tuple[int, ...], log: Any, file: Path
) -> list[Figure]:
    """Train on a set with each seed, and return our accuracy beside that of each peer.

    Runs that are in `file` are not repeated, and new ones are added to it.
    """
    done = read_runs(file)
    weights = data / "weights" / "mobilenet_v2.pth"
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(1, num_seeds + 1):
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "photos"
            write_set(data / "photos", folder, name, seed)
            sides = {"linear probe": (sys.executable, "probe")}
            if fastai is not None:
                some = epochs if seed == 1 and name == next(iter(SETS)) else epochs[:1]
                sides |= {f"fastai, fine_tune({number})": (fastai, f"fastai-{number}") for number in some}

            def note(side: str, run: Callable[[], dict[str, float]], seed: int = seed) -> None:
                if (result := done.get((name, seed, side))) is None:
                    result = run()
                    with file.open("a") as runs:
                        runs.write(json.dumps({"set": name, "seed": seed, "side": side, "result": result}) + "\n")
                found.setdefault(side, []).append(result)
                print(f"  {name}, seed {seed}, {side}: {result}", flush=True)

            for side, (python, peer) in sides.items():
                note(side, partial(run_peer, python, peer, folder, weights, seed, log))
            first = found.get(f"fastai, fine_tune({EPOCHS[0]})")
            seconds = 600.0 if first is None else first[-1]["seconds"]
            note("timm's arguments", partial(run_peer, sys.executable, f"timm-{seconds}", folder, weights, seed, log))
            note("ours", partial(run_ours, folder, weights, seconds, seed, log))
    ours = found.pop("ours")
    figures = []
    for side, runs in found.items():
        mean = 100 * statistics.mean(run["accuracy"] for run in ours[: len(runs)])
        theirs = 100 * statistics.mean(run["accuracy"] for run in runs)
        paired = [mine["accuracy"] - other["accuracy"] for mine, other in zip(ours, runs, strict=False)]
        times = [statistics.mean(run["seconds"] for run in some) for some in (ours, runs)]
        peer = f"{side}: {interval(paired)}, {times[0]:.0f} s and {times[1]:.0f} s"
        figures.append(Figure(f"test accuracy, {name}", mean, "%", peer, theirs, mean / theirs, 1.0, mean >= theirs))
    return figures


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, one set, and fastai for five epochs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resume", action="store_true", help="do not repeat the runs of an earlier call")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    given = parser.parse_args()
    if (data := data_with_photos()) is None:
        return
    seeds, sets, epochs = (1, given.sets[:1], EPOCHS[:1]) if given.quick else (given.seeds, given.sets, EPOCHS)
    figures: list[Figure] = []
    with TemporaryDirectory() as environment, log_file("quality").open("w") as log:
        fastai = install_beside(Path(environment) / "fastai", FASTAI, "fastai.vision.all", log)
        runs = log_file("quality-runs").with_suffix(".jsonl")
        if not given.resume:
            runs.unlink(missing_ok=True)
        for name in sets:
            figures += compare(data, name, seeds, fastai, epochs, log, runs)
            # After each set: all of them take hours.
            note = f"{seeds} seeds; differences are paired, seconds are ours and the peer's"
            write_figures("quality", figures, note=note)


if __name__ == "__main__":
    main()
