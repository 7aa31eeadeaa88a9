"""Throughput, memory and growth of ETL, beside the published recipe and a plain process pool.

All read the same JPEGs of varied size, scale them into 224 pixels and encode them as JPEG. Each has its own processes,
whose start and end are part of its time. A second run with 1 % new files is timed as well.

Run: `make bench-etl`; BENCH_ARGS=--quick for fewer images and pairs.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.image_folder import write_images
from tests.benchmarks.processes import Measured, measure

PEER_GOALS = {"recipe": 4.0, "pool": 0.8}
"""Goals: the least ratio of our images per second to the peer's."""
NEW_SHARE, NEW_GOAL = 0.01, 0.15
MEMORY_GOAL = 1.1
MEGABYTE = 1 << 20


def run_side(name: str, source: Path, scratch: Path, *, keep: bool = False, memory: bool = False) -> Measured:
    """Run one ETL into a target folder below `scratch`, and remove that folder unless `keep` is true."""
    target = scratch / f"{name}-target"
    measured = measure("etl_peers.py", name, str(source), str(target), memory=memory)
    if not keep:
        shutil.rmtree(target)
    used = f"{measured.peak_python_bytes / MEGABYTE:.0f} MB of Python, {measured.peak_bytes / MEGABYTE:.0f} MB"
    print(f"  {name}: {used if memory else f'{measured.seconds:.1f} s'}", flush=True)
    return measured


def against_peers(source: Path, scratch: Path, count: int, num_pairs: int) -> list[Figure]:
    """Compare images per second in pairs of runs whose order alternates.

    The recipe, which takes ten minutes where ours takes one and a half, is only in the first pair.
    """
    rounds = []
    for number in range(num_pairs):
        sides = ["ours", "pool"] if number % 2 else ["pool", "ours"]
        sides += [] if number else ["recipe"]
        rounds.append({name: run_side(name, source, scratch).seconds for name in sides})
    figures = []
    for peer, goal in PEER_GOALS.items():
        pairs = [(count / found["ours"], count / found[peer]) for found in rounds if peer in found]
        figures.append(rate_figure("ETL", "images/s", peer, pairs, goal))
    return figures


def with_new_files(source: Path, scratch: Path, count: int) -> Figure:
    """Compare a run that finds 1 % new files with a first run on all files."""
    whole = run_side("ours", source, scratch, keep=True)
    write_images(source, max(1, round(count * NEW_SHARE)), first=count)
    again = run_side("ours", source, scratch)
    ratio = again.seconds / whole.seconds
    return Figure(
        "ETL, 1 % new files", again.seconds, "s", "all files", whole.seconds, ratio, NEW_GOAL, ratio <= NEW_GOAL
    )


def _first(source: Path, count: int, folder: Path) -> Path:
    """Return a folder with links to the first `count` images of the source."""
    for file in sorted(source.glob("*/*.jpg"), key=lambda found: found.name)[:count]:
        place = folder / file.parent.name
        place.mkdir(parents=True, exist_ok=True)
        os.link(file, place / file.name)
    return folder


def growth(source: Path, scratch: Path, memory_sizes: tuple[int, int], time_sizes: tuple[int, int]) -> list[Figure]:
    """Compare peak memory and time per image, each at two sizes of the source."""
    found = {}
    for count in sorted({*memory_sizes, *time_sizes}):
        folder = _first(source, count, scratch / f"growth-{count}")
        found[count] = run_side("ours", folder, scratch, memory=count in memory_sizes)
        shutil.rmtree(folder)
    memory = {count: found[count].peak_python_bytes / MEGABYTE for count in memory_sizes}
    milliseconds = {count: 1000 * found[count].seconds / count for count in time_sizes}
    figures = []
    for name, unit, values, goal in (
        ("peak memory of Python", "MB", memory, MEMORY_GOAL),
        ("time an image", "ms", milliseconds, 1.0),
    ):
        (small, low), (large, high) = sorted(values.items())
        figures.append(
            Figure(f"{name} at {large} images", high, unit, f"at {small}", low, high / low, goal, high / low <= goal)
        )
    return figures


def main() -> None:
    """Write the images, run all comparisons, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 images, one pair")
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--pairs", type=int, default=3, help="number of pairs with the pool, of three minutes each")
    options = parser.parse_args()
    count, num_pairs = (1_000, 1) if options.quick else (options.images, options.pairs)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        source = scratch / "source"
        write_images(source, count)
        figures = against_peers(source, scratch, count, num_pairs)
        figures += growth(source, scratch, (count // 6, count * 4 // 6), (count // 12, count * 10 // 12))
        figures.append(with_new_files(source, scratch, count))
    write_figures(
        "etl",
        figures,
        note=f"{count} JPEGs of 160 to 1,024 pixels, median of {num_pairs} with the pool, one with the recipe",
    )


if __name__ == "__main__":
    main()
