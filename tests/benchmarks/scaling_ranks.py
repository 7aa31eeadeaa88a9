"""A rank that times all-reduces and training steps over Gloo, and prints them as JSON: `scaling_ranks.py ROUNDS`.

Run by tests/benchmarks/scaling.py, with the variables of torch's `env://` in the environment.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from tests.benchmarks.distributed_ranks import STEPS, bare

MODEL = "resnet18"
SMALL, LARGE = 1, 8 << 20
"""Elements of the all-reduces, float32: 4 bytes and 32 MiB."""
REPEATS = {SMALL: 200, LARGE: 5}


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Return the mean time of a repetition."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    """Time both in rounds, and print the medians of rank 0."""
    num_ranks, num_rounds = int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
    torch.set_num_threads(1)
    train = bare(MODEL, distributed=num_ranks > 1)
    train()
    times: dict[str, list[float]] = {"step": [], "small": [], "large": []}
    for _ in range(num_rounds):
        times["step"].append(seconds_of(train, 1) / STEPS[MODEL])
        for name, size in (("small", SMALL), ("large", LARGE)):
            if num_ranks > 1:
                values = torch.zeros(size)
                times[name].append(
                    seconds_of(lambda values=values: torch.distributed.all_reduce(values), REPEATS[size])
                )
    if os.environ["RANK"] == "0":
        print(json.dumps({name: statistics.median(found) for name, found in times.items() if found}), flush=True)
    if num_ranks > 1:
        torch.distributed.barrier()
    os._exit(0)  # Gloo's threads run: the end of the interpreter would abort the process.


if __name__ == "__main__":
    main()
