"""Time from the submission of a distributed training run to its first step, by cause, beside a bare script of torch.

A local stack runs, and a cache exists. A flow submits a training run to the work pool `gpu`. The worker of the pool
starts its process, which starts 2 ranks. `torchrun` starts the bare script, which trains the same network on as many
images of noise. Each side ran once before.

Run: `make bench-submission`; BENCH_ARGS=--quick for one pair.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deployments.stack.local_stack import local_stack
from tasks.system.listening import free_port
from tests.benchmarks.figures import Figure, medians, write_figures
from tests.benchmarks.peers import Peer, log_file

MODEL, SIDE, BATCH, NUM_CLASSES = "resnet18", 64, 32, 10
"""Network, side of the images in pixels, images per rank and step, and classes."""

GOAL_SECONDS = 8.0
"""Seconds by which a submitted run may take its first step later than the bare script."""

Seconds = dict[str, float]
"""Seconds by cause, and of the whole."""


def run_bare(log: Any) -> Seconds:
    """Run the bare script with two ranks, up to its first step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    settings = {"MODEL": MODEL, "SIDE": SIDE, "BATCH": BATCH, "CLASSES": NUM_CLASSES}
    environment = {f"BENCH_{name}": str(value) for name, value in settings.items()}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.time()
    with subprocess.Popen(
        [*command, str(ROOT / "tests/benchmarks/submission_bare.py")],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        whole = time.time() - began
    if not line:
        raise RuntimeError(f"torchrun ended with {process.returncode}: see {log.name}")
    parts: Seconds = json.loads(line)
    start = {"torchrun and start of Python": whole - sum(parts.values())}
    return start | {f"rank, {name}": value for name, value in parts.items()} | {"whole": whole}


def show(name: str, seconds: Seconds) -> None:
    """Print one round."""
    print(f"{name}: {', '.join(f'{cause} {value:.1f} s' for cause, value in seconds.items())}", flush=True)


def compare(num_pairs: int, home: Path, log: Any) -> list[tuple[Seconds, Seconds]]:
    """Return pairs of rounds in turns, ours first."""
    with local_stack(home, free_port()) as stack:
        # Its own imports are done when the stack answers: those of the submitting flow are not part of the time.
        submits = Peer("submission_runs.py", "-", home, log, environment=stack.environment)
        try:
            pairs = []
            for number in range(num_pairs + 1):
                pair = submits.run_round(), run_bare(log)
                show("submitted", pair[0])
                show("torchrun", pair[1])
                if number:  # else it was the warm-up
                    pairs.append(pair)
        finally:
            submits.close()
    return pairs


def describe(pairs: list[tuple[Seconds, Seconds]]) -> list[Figure]:
    """Return the whole time beside the bare script's, and the causes: beside the same one there, or the whole."""
    both = [(ours["whole"], bare["whole"]) for ours, bare in pairs]
    ours, bare, ratio = medians(both)
    more = statistics.median(ours - bare for ours, bare in both)
    figure = f"submission to the first step, {more:.1f} s more (goal {GOAL_SECONDS:.0f})"
    figures = [Figure(figure, ours, "s", "torchrun of a bare script", bare, ratio, None, more <= GOAL_SECONDS)]
    for cause in pairs[0][0]:
        if cause == "whole":
            continue
        is_shared = cause in pairs[0][1]
        sides = [(ours[cause], bare[cause] if is_shared else ours["whole"]) for ours, bare in pairs]
        peer = f"bare script's {cause.removeprefix('rank, ')}" if is_shared else "the whole"
        figures.append(Figure(f"of it: {cause}", medians(sides)[0], "s", peer, *medians(sides)[1:], None, None))
    return figures


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair")
    num_pairs = 1 if parser.parse_args().quick else 3
    with TemporaryDirectory(prefix="lakevision-bench-") as scratch, log_file("submission").open("w") as log:
        pairs = compare(num_pairs, Path(scratch) / "home", log)
    write_figures(
        "submission",
        describe(pairs),
        note=f"{MODEL} at {SIDE} pixels, {BATCH} images per rank, 2 ranks; median of {num_pairs} pairs in turns",
    )


if __name__ == "__main__":
    main()
