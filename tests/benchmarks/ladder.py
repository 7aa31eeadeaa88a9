"""The scaling ladder on photos, beside the published recipe's own code on the same cores.

The recipe trains a dense head on a frozen mobilenet_v2, which runs on every image in every epoch, in float32. Its step
1 has two epochs here, of which the second is taken 60 times. It reports validation accuracy, the ladder test accuracy.

Run: `make bench-ladder`; BENCH_ARGS=--quick without the recipe on all images.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.etl.listing import is_in_sample
from tasks.ladder.steps import Ladder
from tests.benchmarks import train_data
from tests.benchmarks.accuracy import run_to_best
from tests.benchmarks.figures import Figure, data_with_photos, write_figures
from tests.benchmarks.peers import log_file

FRACTION = 0.1
RECIPE_EPOCHS = 60
"""Epochs of the recipe's first step."""


def climb(photos: Path, weights: Path, home: Path) -> Ladder:
    """Run the flow, and return the ladder."""
    command = [
        *(sys.executable, "-m", "flows.scaling_ladder", "--source", str(photos), "--weights", str(weights)),
        *("--ladder.sample_fraction", str(FRACTION), "--storage.home", str(home)),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Ladder.model_validate_json(done.stdout)


def write_sample(photos: Path, folder: Path) -> None:
    """Link the photos of the sample into class folders."""
    for file in photos.glob("*/*"):
        if is_in_sample(str(file.relative_to(photos)), FRACTION):
            link = folder / file.relative_to(photos)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the recipe on the sample alone")
    given = parser.parse_args()
    if (data := data_with_photos()) is None:
        return
    photos, weights = data / "photos", data / "weights" / "mobilenet_v2.pth"
    figures = []
    with TemporaryDirectory() as scratch, log_file("ladder").open("w") as log:
        folder = Path(scratch)
        write_sample(photos, folder / "sample")
        train_data.write_photos(folder / "sample", folder / "small")
        recipe: dict[int, tuple[float, float]] = {}
        first = run_to_best("recipe-1", folder / "small", weights, 1, log)
        recipe[1] = RECIPE_EPOCHS * (first[-1]["at"] - first[0]["at"]), first[-1]["accuracy"]
        third = run_to_best("recipe-3", folder / "small", weights, 1, log)
        recipe[3] = third[-1]["at"], max(row["accuracy"] for row in third)
        ladder = climb(photos, weights, folder / "home")
        if not given.quick:
            train_data.write_photos(photos, folder / "all")
            fourth = run_to_best("recipe-3", folder / "all", weights, 1, log)
            recipe[4] = fourth[-1]["at"], max(row["accuracy"] for row in fourth)
    for number, step in enumerate(ladder.steps, 1):
        if step.left_out:
            print(f"step {number} left out: {step.left_out}", flush=True)
            continue
        shown = f"{number}. {step.name}"
        seconds, accuracy = recipe.get(number, (None, None))
        if seconds is None or accuracy is None:
            before = ladder.steps[number - 2]
            figures += [
                Figure(f"time, {shown}", step.seconds, "s", "ours, the step before", before.seconds,
                       before.seconds / step.seconds, None, None),
                Figure(f"test accuracy, {shown}", 100 * step.accuracy, "%", "ours, the step before",
                       100 * before.accuracy, step.accuracy / before.accuracy, None, None),
            ]  # fmt: skip
            continue
        figures += [
            Figure(f"time, {shown}", step.seconds, "s", f"the recipe, step {number}", seconds,
                   seconds / step.seconds, None, None),
            Figure(f"test accuracy, {shown}", 100 * step.accuracy, "%", f"the recipe, step {number}, val",
                   100 * accuracy, step.accuracy / accuracy, None, None),
        ]  # fmt: skip
    print(json.dumps({"next": ladder.advice}), flush=True)
    write_figures("ladder", figures, note=f"one run of each, a sample of {100 * FRACTION:.0f} %")


if __name__ == "__main__":
    main()
