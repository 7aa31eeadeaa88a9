"""ETL: images a second against the recipe and a plain process pool, a run with 1 % new files, memory and growth.

Run: `make bench-etl`; BENCH_ARGS=--quick for fewer pictures and pairs. All sides read the same JPEGs of varied size,
scale them into 224 pixels and encode them as JPEG, each in processes of its own, started and ended within its time.
"""

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.figures import Figure, write_figures  # noqa: E402
from tests.benchmarks.pictures import write_pictures  # noqa: E402
from tests.benchmarks.processes import Measured, measure  # noqa: E402

PEER_GOALS = {"recipe": 4.0, "pool": 0.8}
"""At least this many times the peer's images a second."""
NEW_SHARE, NEW_GOAL = 0.01, 0.15
GROWTH_GOAL = 1.1
MEGABYTE = 1 << 20


def run_side(name: str, source: Path, scratch: Path) -> Measured:
    """Run one side into an empty target, and remove what it wrote."""
    target = scratch / f"{name}-target"
    measured = measure("etl_peers.py", name, str(source), str(target))
    shutil.rmtree(target)
    print(f"  {name}: {measured.seconds:.1f} s, {measured.peak_bytes / MEGABYTE:.0f} MB", flush=True)
    return measured


def against_peers(source: Path, scratch: Path, count: int, num_pairs: int) -> list[Figure]:
    """Compare images a second, the sides of a pair one after the other."""
    rounds = [{name: run_side(name, source, scratch) for name in ("ours", *PEER_GOALS)} for _ in range(num_pairs)]
    ours = statistics.median(count / found["ours"].seconds for found in rounds)
    figures = []
    for peer, goal in PEER_GOALS.items():
        ratio = statistics.median(found[peer].seconds / found["ours"].seconds for found in rounds)
        theirs = statistics.median(count / found[peer].seconds for found in rounds)
        figures.append(Figure("ETL", ours, "images/s", peer, theirs, ratio, goal, ratio >= goal))
    return figures


def with_new_files(source: Path, scratch: Path, count: int) -> Figure:
    """Compare a run that finds 1 % of new files with the one that read them all."""
    target = scratch / "incremental"
    whole = measure("etl_peers.py", "ours", str(source), str(target))
    new = max(1, round(count * NEW_SHARE))
    write_pictures(source, new, first=count)
    again = measure("etl_peers.py", "ours", str(source), str(target))
    shutil.rmtree(target)
    ratio = again.seconds / whole.seconds
    return Figure(
        "ETL, 1 % new files", again.seconds, "s", "all files", whole.seconds, ratio, NEW_GOAL, ratio <= NEW_GOAL
    )


def growth(scratch: Path, small: int, large: int) -> list[Figure]:
    """Compare peak memory, and time a picture, at two sizes of the source."""
    found = []
    for count in (small, large):
        source = scratch / f"growth-{count}"
        write_pictures(source, count)
        found.append(run_side("ours", source, scratch))
        shutil.rmtree(source)
    memory = found[1].peak_python_bytes / found[0].peak_python_bytes
    each = found[1].seconds / large / (found[0].seconds / small)
    return [
        Figure(
            f"peak memory of Python at {large} pictures",
            found[1].peak_python_bytes / MEGABYTE,
            "MB",
            f"at {small}",
            found[0].peak_python_bytes / MEGABYTE,
            memory,
            GROWTH_GOAL,
            memory <= GROWTH_GOAL,
        ),
        Figure(
            f"time a picture at {large} pictures",
            1000 * found[1].seconds / large,
            "ms",
            f"at {small}",
            1000 * found[0].seconds / small,
            each,
            1.0,
            each <= 1.0,
        ),
    ]


def main() -> None:
    """Make the pictures, run every comparison, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 pictures, one pair")
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=2, help="pairs; one takes minutes")
    options = parser.parse_args()
    count, num_pairs = (1_000, 1) if options.quick else (options.pictures, options.pairs)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        source = scratch / "source"
        write_pictures(source, count)
        figures = against_peers(source, scratch, count, num_pairs)
        figures.append(with_new_files(source, scratch, count))
        shutil.rmtree(source)
        figures += growth(scratch, count // 2, count * 2)
    write_figures("etl", figures, note=f"{count} JPEGs of 160 to 1,024 pixels, median of {num_pairs} pairs")


if __name__ == "__main__":
    main()
