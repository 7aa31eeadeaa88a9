"""Throughput of streaming inference beside batch inference, and its lag while images arrive at half of its rate.

Both read the same table and run mobilenet_v2 at 224 pixels, each in a process of its own. Then images are added to a
table in small commits, while a stream with a batch each second predicts them. The lag is the number of images that were
added and have no prediction.

Run: `make bench-stream`; BENCH_ARGS=--quick for fewer images and one pair.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import deltalake

from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.predict import rates, run_side
from tests.benchmarks.predict_data import Inputs, add_repeated, register_model, write_repeated, write_source

RATE_GOAL, LAG_GOAL = 0.8, 1.25
ADDED_IMAGES = 32
"""Images per commit while the lag is measured."""

FIRST_BATCH_SECONDS = 120
"""Time limit for the first predictions of the stream."""


def against_batch(inputs: Inputs, num_pairs: int) -> list[Figure]:
    """Compare the rates in pairs whose order alternates."""
    rounds = []
    for number in range(num_pairs):
        order = ("stream", "ours") if number % 2 else ("ours", "stream")
        rounds.append({name: rates(run_side(name, inputs), inputs) for name in order})
    figures = []
    for place, figure in enumerate(("stream", "stream, without start")):
        pairs = [(found["stream"][place], found["ours"][place]) for found in rounds]
        figures.append(rate_figure(figure, "images/s", "batch", pairs, RATE_GOAL))
    return figures


def num_predicted(inputs: Inputs) -> int:
    """Return the number of predictions in the table."""
    if not deltalake.DeltaTable.is_deltatable(str(inputs.written)):
        return 0
    return int(deltalake.DeltaTable(str(inputs.written)).count())


def lag(inputs: Inputs, rate: float, seconds: float) -> list[tuple[float, int]]:
    """Return times in seconds and images without a prediction, while images are added at a rate.

    Args:
        inputs: A table that does not exist yet.
        rate: Images per second.
        seconds: Duration, from the first predictions on.

    Raises:
        RuntimeError: The stream ended or predicted nothing.
    """
    add_repeated(inputs, 0, ADDED_IMAGES)
    added, lags = ADDED_IMAGES, []
    arguments = ("endless_stream", str(inputs.folder), str(inputs.count), inputs.model)
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "predict_peers.py"), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            limit = time.monotonic() + FIRST_BATCH_SECONDS
            while not num_predicted(inputs):
                if running.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError("the stream predicted nothing")
                time.sleep(0.5)
            began = time.monotonic()
            while (passed := time.monotonic() - began) < seconds:
                while added < ADDED_IMAGES + rate * passed:
                    add_repeated(inputs, added, ADDED_IMAGES)
                    added += ADDED_IMAGES
                lags.append((passed, added - num_predicted(inputs)))
                time.sleep(0.5)
            if running.poll() is not None:
                raise RuntimeError("the stream ended")
        finally:
            running.send_signal(signal.SIGINT)
    return lags


def bounded(lags: list[tuple[float, int]], rate: float) -> list[Figure]:
    """Compare the median lag of the last third of the time with that of the second third, as seconds of arrivals."""
    third = lags[-1][0] / 3
    second, last = (
        statistics.median(images for passed, images in lags if begin * third <= passed < (begin + 1) * third)
        for begin in (1, 2)
    )
    figure = f"median lag at {rate:.0f} images/s, half the rate, last third of {lags[-1][0]:.0f} s"
    ratio = last / max(second, 1)
    return [Figure(figure, last / rate, "s", "second third", second / rate, ratio, LAG_GOAL, ratio <= LAG_GOAL)]


def main() -> None:
    """Write the images, register the model, run both comparisons, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="500 images, one pair, 40 s")
    parser.add_argument("--images", type=int, default=10_000, help="images of the table for the rates")
    parser.add_argument("--pairs", type=int, default=3, help="number of pairs")
    parser.add_argument("--seconds", type=float, default=240.0, help="duration of the arrivals")
    options = parser.parse_args()
    count, num_pairs, seconds = options.images, options.pairs, options.seconds
    if options.quick:
        count, num_pairs, seconds = 500, 1, 40.0
    with TemporaryDirectory(prefix="lakevision-bench-") as scratch:
        inputs = Inputs(Path(scratch), count)
        write_source(Inputs(Path(scratch), min(count, 1000)))
        register_model(inputs)
        write_repeated(inputs)
        figures = against_batch(inputs, num_pairs)
        half = figures[1].value / 2
        figures += bounded(lag(Inputs(Path(scratch), 0), half, seconds), half)
    write_figures("stream", figures, note=f"{count} JPEGs of 160 to 1,024 pixels, median of {num_pairs} pairs")


if __name__ == "__main__":
    main()
