"""The formula of `scaling_model.py` with figures measured here over Gloo, beside measured steps of 2, 3 and 4 ranks.

Bandwidth and time of a message are those of two ranks. Ranks beyond the number of cores share them, so their
computation takes as many times as long. Then the model's efficiency on GPUs is printed, which is not measured.

Run: `make bench-scaling`; BENCH_ARGS=--quick for fewer rounds.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torchvision

from tasks.system.listening import free_port
from tests.benchmarks import scaling_model
from tests.benchmarks.figures import Figure, write_figures
from tests.benchmarks.scaling_model import Link, Step, overlapped_seconds
from tests.benchmarks.scaling_ranks import LARGE, MODEL

FLOAT_BYTES = 4


def measure(num_ranks: int, num_rounds: int) -> dict[str, float]:
    """Run ranks of one thread each; return the seconds of a step, and with several ranks those of the all-reduces."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "benchmarks" / "scaling_ranks.py"), str(num_rounds)],
            cwd=ROOT,
            env=os.environ
            | shared
            | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{num_ranks} ranks ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def link_of(pair: dict[str, float]) -> Link:
    """Return the link between two ranks, by the formula of the ring: two messages of half of the bytes."""
    hop = pair["small"] / 2
    return Link("lo", LARGE * FLOAT_BYTES / (pair["large"] - pair["small"]), hop, "measured")


def compare(found: dict[int, dict[str, float]], num_cores: int) -> list[Figure]:
    """Return predicted and measured milliseconds of a step."""
    network = torchvision.models.get_model(MODEL, num_classes=10)
    gradient_bytes = FLOAT_BYTES * sum(parameter.numel() for parameter in network.parameters())
    link, figures = link_of(found[2]), []
    for num_ranks, measured in found.items():
        if num_ranks > 1:
            turns = max(1.0, num_ranks / num_cores)
            step = Step(MODEL, 0, turns * found[1]["step"], gradient_bytes, "measured")
            predicted = overlapped_seconds(step, num_ranks, link)
            title = f"predicted step of {num_ranks} ranks"
            figures.append(
                Figure(
                    title,
                    1000 * predicted,
                    "ms",
                    "measured",
                    1000 * measured["step"],
                    predicted / measured["step"],
                    None,
                    None,
                )
            )
    return figures


def main() -> None:
    """Measure one to four ranks, write the figures, and print the model's efficiency on GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round in place of three")
    num_rounds = 1 if parser.parse_args().quick else 3
    num_cores = len(os.sched_getaffinity(0))
    found = {number: measure(number, num_rounds) for number in (1, 2, 3, 4)}
    link = link_of(found[2])
    note = (
        f"resnet18 at 64 pixels, 32 images per rank of one thread, between two ranks {link.bytes_per_second / 1e9:.2f} "
        f"GB/s and {1e6 * link.hop_seconds:.0f} us per message; median of {num_rounds} rounds"
    )
    write_figures("scaling", compare(found, num_cores), note)
    print()
    scaling_model.main()


if __name__ == "__main__":
    main()
