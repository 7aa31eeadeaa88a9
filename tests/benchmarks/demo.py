"""Time per stage of the DAG on the built-in digits, cold (an empty home) and warm (a second run).

Run: `make bench-demo`; BENCH_ARGS=--quick for one round instead of three.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.environment import lakevision_home
from tasks.system.listening import free_port
from tests.benchmarks.figures import Figure, write_figures
from tests.builders.processes import plain_environment

HALF = 0.5
"""Goal: a second run takes less than half the time of the first."""


def run_demo(home: Path) -> dict[str, float]:
    """Run the demo in `home`, and return the seconds per stage, and of the whole run as `whole`."""
    environment = plain_environment(LAKEVISION_HOME=str(home), LAKEVISION_PORT=str(free_port()))
    began = time.monotonic()
    transcript = lakevision_home() / "bench" / "demo.log"
    transcript.parent.mkdir(parents=True, exist_ok=True)
    with transcript.open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "deployments.demo"], cwd=ROOT, env=environment, stdout=log, stderr=log, check=True
        )
    whole = time.monotonic() - began
    return json.loads((home / "summary.json").read_text())["seconds"] | {"whole": round(whole, 2)}


def main() -> None:
    """Run pairs of a cold and a warm demo, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair")
    num_pairs = 1 if parser.parse_args().quick else 3
    pairs = []
    for number in range(num_pairs):
        with TemporaryDirectory() as scratch:
            home = Path(scratch) / "home"
            pairs.append((run_demo(home), run_demo(home)))
            print(
                f"pair {number + 1} of {num_pairs}: cold {pairs[-1][0]['whole']} s, warm {pairs[-1][1]['whole']} s",
                flush=True,
            )
    figures = []
    for stage in pairs[0][0]:
        cold = statistics.median(pair[0][stage] for pair in pairs)
        warm = statistics.median(pair[1][stage] for pair in pairs)
        ratio = statistics.median(pair[1][stage] / max(pair[0][stage], 0.01) for pair in pairs)
        goal = HALF if stage == "whole" else None
        figures.append(
            Figure(
                figure=f"{stage}, warm",
                value=warm,
                unit="s",
                peer="cold",
                peer_value=cold,
                ratio=ratio,
                goal=goal,
                holds=None if goal is None else ratio < goal,
            )
        )
    write_figures("demo", figures, note=f"median of {num_pairs} pairs")


if __name__ == "__main__":
    main()
