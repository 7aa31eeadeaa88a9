"""Growth of the steps that work on names, times and hashes, up to ten million files: memory of the driver, and seconds.

The tables have rows without images, and the source has links to one small file. One per cent of new files are images.
Each step runs in a separate process. The names of the source are read once before it is listed, so that they are in the
system's cache at every size. The peer of a size is the next smaller one; the goal of the ratio is n log n.

Run: `make bench-scale`; BENCH_ARGS=--quick for ten and a hundred thousand files.
"""

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.figures import Figure, write_figures
from tests.benchmarks.scale_steps import STEPS

MEMORY_GOAL_MB = 2_000
"""Bound of the driver's peak memory, at every size."""

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Cost:
    """Costs of one step at one size; memory in bytes, 0 for the JVM of a step without Spark."""

    seconds: float
    driver_bytes: int
    jvm_bytes: int


def run_script(name: str, *arguments: str) -> str:
    """Run a script of this folder in a process of its own; return the last line of its output.

    Raises:
        RuntimeError: The script failed; the message has its last lines.
    """
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / name), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout.splitlines()[-1]


def measure_size(count: int, steps: list[str], folder: Path) -> dict[str, Cost]:
    """Make tables and a source of so many files below `folder`, and run the steps on them in order."""
    run_script("scale_data.py", str(folder), str(count))
    costs = {}
    for step in steps:
        cost = Cost(**json.loads(run_script("scale_steps.py", step, str(folder))))
        memory = f"driver {cost.driver_bytes / MEGABYTE:.0f} MB, JVM {cost.jvm_bytes / MEGABYTE:.0f} MB"
        print(f"  {count} files, {step}: {cost.seconds:.1f} s, {memory}", flush=True)
        costs[step] = cost
    return costs


def figures_of(costs: dict[int, dict[str, Cost]], steps: list[str]) -> list[Figure]:
    """Return time and memory of each step at every size, beside the next smaller size and the bound."""
    figures = []
    sizes = sorted(costs)
    for step in steps:
        for smaller, size in pairwise(sizes):
            low, high = costs[smaller][step].seconds, costs[size][step].seconds
            goal = round(size * math.log(size) / (smaller * math.log(smaller)), 1)
            ratio = high / low
            figures.append(
                Figure(f"{step}, {size} files", high, "s", f"{smaller} files", low, ratio, goal, ratio <= goal)
            )
        for size in sizes:
            for name, used, bound in (
                ("driver", costs[size][step].driver_bytes, MEMORY_GOAL_MB),
                ("JVM", costs[size][step].jvm_bytes, None),
            ):
                if used:
                    value, peer = used / MEGABYTE, MEMORY_GOAL_MB
                    label = f"{step}, memory of the {name}, {size} files"
                    holds = None if bound is None else value < bound
                    figures.append(Figure(label, value, "MB", "bound", peer, value / peer, bound and 1.0, holds))
    return figures


def main() -> None:
    """Measure every size, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten and a hundred thousand files")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--folder", help="parent of the data; a home of 10^7 files takes about 5 GB")
    options = parser.parse_args()
    sizes = [10**4, 10**5] if options.quick else options.sizes
    costs = {}
    for count in sizes:
        with TemporaryDirectory(dir=options.folder) as folder:
            costs[count] = measure_size(count, options.steps, Path(folder))
    write_figures(
        "scale",
        figures_of(costs, options.steps),
        note="one run per size; an incremental run reads 1 % new files, 8x8 pixels each",
    )


if __name__ == "__main__":
    main()
