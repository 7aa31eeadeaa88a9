"""Throughput and utilisation of a GPU: per precision and memory format, our loop, and batch inference.

Our loop is measured beside images in GPU memory, batch inference beside that on the same machine's CPU.

Run: `make bench-gpu`; BENCH_ARGS=--quick for fewer steps. Without a GPU nothing is measured.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import read_manifest
from tasks.config.recipe import values_of
from tasks.config.train import TrainConfig
from tasks.environment import rank_environment
from tasks.model.device import make_deterministic, make_optimizer
from tasks.model.precision import choose_precision
from tasks.model.training_network import build_classifier
from tasks.refs import TRAIN
from tasks.train.loop import TrainedEpoch, train_one_epoch
from tests.benchmarks import loader_data
from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.predict import rates, run_side
from tests.benchmarks.predict_data import Inputs, register_model, write_source, write_table
from tests.fakes.tiny_training import loop_of

BATCH_SIZE = 128
SIDE = 224
MODEL = "resnet50"
DEVICE = torch.device("cuda")

NVML_SECONDS = 1.0
"""The longest window of NVML's utilisation, which is 1/6 to 1 s by product."""
POLL_SECONDS = 0.1

VARIANTS = (
    ("fp32", {}),
    ("TF32", {"tf32": True}),
    ("bf16", {"bf16": True}),
    ("bf16, channels-last", {"bf16": True, "channels_last": True}),
    ("bf16, channels-last, compiled", {"bf16": True, "channels_last": True, "compiled": True}),
)

Train = Callable[[int], float]
"""A function that trains so many steps; it returns the images per second."""


@contextmanager
def watched() -> Iterator[list[int]]:
    """Collect the GPU's utilisation in percent while the block runs; a short block has no samples."""
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        # The first window must not reach back before the block.
        pause = NVML_SECONDS
        while not over.wait(pause):
            found.append(torch.cuda.utilization())  # from NVML, for torch's current GPU
            pause = POLL_SECONDS

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def in_memory(*, tf32: bool = False, bf16: bool = False, channels_last: bool = False, compiled: bool = False) -> Train:
    """Return full fine-tuning on images in GPU memory, whose kernels are chosen and compiled."""
    torch.manual_seed(1)
    model = build_classifier(MODEL, "none", 10, freeze_backbone=False).to(DEVICE)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack memory_format
    model.precision = torch.bfloat16 if bf16 else None
    if compiled:
        model.network.compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images = torch.randint(0, 256, (BATCH_SIZE, SIDE, SIDE, 3), dtype=torch.uint8, device=DEVICE)
    labels = torch.arange(BATCH_SIZE, device=DEVICE) % 10
    model.train()

    def train(steps: int) -> float:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()
        return steps * BATCH_SIZE / (time.perf_counter() - began)

    train(5)
    return train


def our_loop(url: str) -> Callable[[], TrainedEpoch]:
    """Return our loop on our cache, an epoch per call, with the settings of a training run."""
    manifest = read_manifest(url)
    assert manifest is not None
    torch.manual_seed(1)
    train = TrainConfig(model=MODEL, weights="none", freeze_backbone=False, batch_size=BATCH_SIZE)
    classifier = build_classifier(MODEL, "none", len(manifest.classes), freeze_backbone=False).to(DEVICE)
    classifier = classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack memory_format
    classifier.precision = choose_precision(train.precision, DEVICE, manifest.image_size)
    optimizer = make_optimizer(values_of(train), classifier)
    loader = CacheLoader(url, manifest, TRAIN, BATCH_SIZE, seed=1, pin_memory=True)
    numbers = iter(range(1_000_000))

    def epoch() -> TrainedEpoch:
        rate = train.learning_rate
        loop = loop_of(lambda step: rate, device=DEVICE)
        return train_one_epoch(classifier, loader, optimizer, loop, next(numbers))

    epoch()  # The cache's files are read from disk.
    return epoch


def share(title: str, percent: float) -> Figure:
    """Return a figure that is a share of the time."""
    return Figure(title, percent, "%", "all of the time", 100.0, percent / 100, None, None)


def figures_of_variants(steps: int) -> list[Figure]:
    """Return the throughput of each variant beside float32, and the utilisation of the GPU."""
    name, found = torch.cuda.get_device_name(), list[Figure]()
    for variant, options in VARIANTS:
        train = in_memory(**options)
        with watched() as utilisation:
            speed = train(steps)
        base = found[0].value if found else speed
        title = f"images/s of {MODEL} on images in GPU memory, {variant}"
        found.append(Figure(title, speed, "", f"fp32 on {name}", base, speed / base, None, None))
        if utilisation:
            found.append(share(f"GPU utilisation, {variant}", statistics.mean(utilisation)))
    return found


def figures_of_loop(url: str, steps: int, rounds: int) -> list[Figure]:
    """Return the throughput of our loop on our cache, of epochs of `steps` steps, beside images in GPU memory."""
    as_it_comes = in_memory(bf16=True, channels_last=True)
    make_deterministic(DEVICE)  # Every training run does this.
    deterministic, epoch = in_memory(bf16=True, channels_last=True), our_loop(url)
    pairs: list[tuple[float, float]] = []
    deterministic_pairs: list[tuple[float, float]] = []
    waits: list[float] = []
    utilisations: list[int] = []
    for _ in range(rounds):
        with watched() as utilisation:
            trained = epoch()
        waits.append(100 * trained.data_wait_share)
        utilisations += utilisation
        speed = trained.images_per_second
        deterministic_pairs.append((speed, deterministic(steps)))
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.cudnn.deterministic = False
        pairs.append((speed, as_it_comes(steps)))
        make_deterministic(DEVICE)
    title, memory = f"images/s of {MODEL}, our loop on our cache", "images in GPU memory, bf16, channels-last"
    return [
        rate_figure(title, "", memory, pairs, None),
        rate_figure(title, "", f"{memory}, deterministic", deterministic_pairs, None),
        share("waiting for batches, our loop on our cache", statistics.median(waits)),
        *([share("GPU utilisation, our loop on our cache", statistics.mean(utilisations))] if utilisations else []),
    ]


def figures_of_inference(folder: Path, count: int, rounds: int) -> list[Figure]:
    """Return the throughput of batch inference with Spark, decoding included, on the GPU and on the CPU."""
    inputs = Inputs(folder, count)
    write_source(inputs)
    register_model(inputs)
    write_table(inputs)
    names = ("ours", "ours_on_cpu")
    found = [{name: run_side(name, inputs) for name in names[:: -1 if turn % 2 else 1]} for turn in range(rounds)]
    return [
        rate_figure(
            f"batch inference{part} on {torch.cuda.get_device_name()}",
            "images/s",
            "on the CPU",
            [(rates(pair["ours"], inputs)[place], rates(pair["ours_on_cpu"], inputs)[place]) for pair in found],
            None,
        )
        for place, part in enumerate(("", ", without start"))
    ]


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    os.environ.update(rank_environment())  # The environment of ranks, which cuBLAS reads with its first kernel.
    figures = figures_of_variants(20 if quick else 100)
    with TemporaryDirectory() as scratch:
        url, num_rows = str(Path(scratch) / "uint8"), 2_000 if quick else 8_000
        loader_data.write_cache(url, {"train": num_rows, "val": num_rows // 10, "test": num_rows // 10}, "uint8")
        figures += figures_of_loop(url, num_rows // BATCH_SIZE, 2 if quick else 5)
        figures += figures_of_inference(Path(scratch) / "inference", 600 if quick else 20_000, 1 if quick else 3)
    where = f"{torch.cuda.get_device_name()}, {BATCH_SIZE} images of {SIDE} pixels per step, one process"
    write_figures("gpu", figures, note=f"{where}; " + ("quick" if quick else "rounds in turns"))


if __name__ == "__main__":
    main()
