"""Throughput, start and memory of batch inference, beside a bare loop over files and other ways to infer on Spark.

All read the same JPEGs and run mobilenet_v2 at 224 pixels, each in its own processes. The time of ours and of the bare
loop is from the call to the written predictions. The rates of the peers on Spark, and of ours beside them, leave the
start of the session out, since the slow ones predict fewer images. Memory is measured with a network at 64 pixels.

Run: `make bench-predict`; BENCH_ARGS=--quick for fewer images and one pair.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.predict_data import (
    GROWTH_MODEL,
    GROWTH_SIDE,
    Inputs,
    register_model,
    write_first,
    write_repeated,
    write_source,
    write_table,
)
from tests.benchmarks.processes import Measured, measure

BARE_GOAL, SPARK_GOAL, START_GOAL, MEMORY_GOAL = 0.9, 2.0, 5.0, 1.1
BARE_PEERS = {"bare": ("bare loop", BARE_GOAL), "bare_in_passes": ("bare loop, passes of our size", None)}
SPARK_PEERS = {
    "spark_udf": ("mlflow.pyfunc.spark_udf of torchvision's network", SPARK_GOAL),
    "packaged_udf": ("mlflow.pyfunc.spark_udf of our package", None),
    "predict_batch_udf": ("predict_batch_udf of Spark", SPARK_GOAL),
    "recipe": ("recipe", SPARK_GOAL),
}
START_IMAGES = 64
MEGABYTE = 1 << 20


def run_side(name: str, inputs: Inputs, *, memory: bool = False) -> tuple[Measured, float]:
    """Run one side; return what was measured, and its images per second without the start of a session."""
    arguments = (name, str(inputs.folder), str(inputs.count), inputs.model)
    measured = measure("predict_peers.py", *arguments, memory=memory)
    found = json.loads(measured.last_line)
    rate = found.get("images_per_second", 0.0)
    print(f"  {name}, {inputs.count} images: {found['seconds']:.1f} s, {rate:.1f} images/s", flush=True)
    return Measured(found["seconds"], measured.peak_python_bytes, measured.peak_bytes, measured.seconds), rate


def rates(side: tuple[Measured, float], inputs: Inputs) -> tuple[float, float]:
    """Return the images per second of a side, with and without the start of a session."""
    measured, without_start = side
    return inputs.count / measured.seconds, without_start


def against_bare_loop(inputs: Inputs, num_pairs: int) -> list[Figure]:
    """Compare with the bare loops, in alternating order."""
    sides = ("ours", *BARE_PEERS)
    rounds = []
    for number in range(num_pairs):
        order = sides[:: -1 if number % 2 else 1]
        rounds.append({name: run_side(name, inputs) for name in order})
    figures = []
    for peer, (named, goal) in BARE_PEERS.items():
        for place, figure in enumerate(("batch inference", "batch inference, without start")):
            pairs = [(rates(found["ours"], inputs)[place], rates(found[peer], inputs)[place]) for found in rounds]
            figures.append(rate_figure(figure, "images/s", named, pairs, None if place else goal))
    return figures


def against_spark(inputs: Inputs, num_pairs: int) -> list[Figure]:
    """Compare rates without the start of the session, each peer beside a run of ours on the same table."""
    figures = []
    for peer, (named, goal) in SPARK_PEERS.items():
        pairs = []
        for number in range(num_pairs):
            order = ("ours", peer) if number % 2 else (peer, "ours")
            found = {name: run_side(name, inputs)[1] for name in order}
            pairs.append((found["ours"], found[peer]))
        figures.append(rate_figure("batch inference, without start", "images/s", named, pairs, goal))
    return figures


def start(inputs: Inputs, num_pairs: int) -> Figure:
    """Compare a fresh process that predicts a few images with a fresh bare session and its empty pandas UDF."""
    pairs = []
    for number in range(num_pairs):
        order = ("ours", "empty_udf") if number % 2 else ("empty_udf", "ours")
        whole = {name: run_side(name, inputs)[0].whole_seconds for name in order}
        pairs.append((whole["ours"], whole["empty_udf"]))
    more = statistics.median(ours - bare for ours, bare in pairs)
    ours, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
    figure = f"fresh process to {inputs.count} written predictions, {more:.1f} s more (goal {START_GOAL:.0f})"
    return Figure(figure, ours, "s", "bare session, empty pandas UDF", bare, ours / bare, None, more <= START_GOAL)


def growth(folder: Path, small: int, large: int) -> list[Figure]:
    """Compare the peak memory at two sizes of the table."""
    found = []
    for count in (small, large):
        inputs = Inputs(folder, count, GROWTH_MODEL)
        write_repeated(inputs)
        found.append(run_side("ours", inputs, memory=True)[0])
    figures = []
    for part, low, high in (
        ("with the JVM", found[0].peak_bytes, found[1].peak_bytes),
        ("of Python", found[0].peak_python_bytes, found[1].peak_python_bytes),
    ):
        goal = MEMORY_GOAL if part == "with the JVM" else None
        holds = None if goal is None else high / low <= goal
        figure = f"peak memory {part} at {large} images"
        figures.append(Figure(figure, high / MEGABYTE, "MB", f"at {small}", low / MEGABYTE, high / low, goal, holds))
    return figures


def main() -> None:
    """Write the images, register the models, run all comparisons, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="600 images, one pair")
    parser.add_argument("--images", type=int, default=20_000, help="images beside the bare loop")
    parser.add_argument("--slow-images", type=int, default=4_000, help="images beside the peers on Spark")
    parser.add_argument("--pairs", type=int, default=3, help="number of pairs with each peer")
    parser.add_argument("--growth", type=int, default=50_000, help="images of the larger table for memory")
    options = parser.parse_args()
    count, slow, num_pairs, large = options.images, options.slow_images, options.pairs, options.growth
    if options.quick:
        count, slow, num_pairs, large = 600, 300, 1, 2_000
    with TemporaryDirectory(prefix="lakevision-bench-") as scratch:
        folder = Path(scratch)
        inputs, slow_inputs, first_inputs = (Inputs(folder, number) for number in (count, slow, START_IMAGES))
        write_source(inputs)
        register_model(inputs)
        register_model(Inputs(folder, count, GROWTH_MODEL), GROWTH_SIDE)
        write_table(inputs)
        write_repeated(slow_inputs)
        write_first(first_inputs, inputs.table)
        figures = against_bare_loop(inputs, num_pairs)
        figures += against_spark(slow_inputs, num_pairs)
        figures.append(start(first_inputs, num_pairs))
        figures += growth(folder, large // 10, large)
    write_figures(
        "predict",
        figures,
        note=f"{count} JPEGs of 160 to 1,024 pixels beside the bare loop and {slow} beside the peers on Spark, "
        f"median of {num_pairs} pairs",
    )


if __name__ == "__main__":
    main()
