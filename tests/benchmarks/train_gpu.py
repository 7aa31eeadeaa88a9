"""Training throughput and utilisation of a GPU per precision and memory format."""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import read_manifest
from tasks.config.train import TrainConfig
from tasks.environment import rank_environment
from tasks.model.device import make_deterministic, make_optimizer
from tasks.model.network import build_classifier
from tasks.model.precision import choose_precision
from tasks.schema import TRAIN
from tasks.train.loop import TrainedEpoch, train_one_epoch
from tests.benchmarks import loader_data
from tests.benchmarks.figures import Figure
from tests.fakes.tiny_training import loop_of

BATCH_SIZE = 128
STEPS = 100
SIDE = 224
MODEL = "resnet50"
NUM_ROWS = 8_000
"""Images per epoch from a cache: 63 steps, next to which the wait for the first batch is short."""
EPOCHS = 3

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


def images_per_second(
    *, tf32: bool = False, bf16: bool = False, channels_last: bool = False, compiled: bool = False
) -> tuple[float, list[int]]:
    """Return images per second of full fine-tuning on images in GPU memory, and the GPU's utilisation."""
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(1)
    model = build_classifier(MODEL, "none", 10, freeze_backbone=False).to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack memory_format
    model.precision = torch.bfloat16 if bf16 else None
    if compiled:
        model.network.compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images = torch.randint(0, 256, (BATCH_SIZE, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    labels = torch.arange(BATCH_SIZE, device=device) % 10
    model.train()

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()

    run(5)  # Warm-up: kernels are chosen and compiled.
    with watched() as utilisation:
        began = time.perf_counter()
        run(STEPS)
        seconds = time.perf_counter() - began
    return STEPS * BATCH_SIZE / seconds, utilisation


def our_loop(url: str, device: torch.device) -> tuple[list[TrainedEpoch], list[int]]:
    """Train with our loop on our cache, and return all epochs but the first, and the GPU's utilisation."""
    manifest = read_manifest(url)
    assert manifest is not None
    make_deterministic(device)  # Every training run does this.
    torch.manual_seed(1)
    train = TrainConfig(model=MODEL, weights="none", freeze_backbone=False, batch_size=BATCH_SIZE)
    classifier = build_classifier(MODEL, "none", len(manifest.classes), freeze_backbone=False).to(device)
    classifier = classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack memory_format
    classifier.precision = choose_precision(train.precision, device, manifest.image_size)
    optimizer = make_optimizer(train, classifier, train.learning_rate)
    loader = CacheLoader(url, manifest, TRAIN, BATCH_SIZE, seed=1)

    def epoch(number: int) -> TrainedEpoch:
        rate = train.learning_rate
        return train_one_epoch(classifier, loader, optimizer, loop_of(lambda step: rate, device=device), number)

    epoch(0)  # Warm-up: kernels are chosen, the cache's files are read from disk.
    with watched() as utilisation:
        epochs = [epoch(number) for number in range(1, EPOCHS + 1)]
    return epochs, utilisation


def share(title: str, percent: float) -> Figure:
    """Return a figure that is a share of the time."""
    return Figure(title, percent, "%", "all of the time", 100.0, percent / 100, None, None)


def gpu_figures() -> list[Figure]:
    """Return figures of each variant beside float32, and of our loop; an empty list without a GPU."""
    if not torch.cuda.is_available():
        print("no GPU here: its figures are left out", flush=True)
        return []
    os.environ.update(rank_environment())  # The environment of ranks, which cuBLAS reads with its first kernel.
    found = {variant: images_per_second(**options) for variant, options in VARIANTS}
    with TemporaryDirectory() as scratch:
        url = str(Path(scratch) / "uint8")
        loader_data.write_cache(url, {"train": NUM_ROWS, "val": NUM_ROWS // 10, "test": NUM_ROWS // 10}, "uint8")
        epochs, utilisation = our_loop(url, torch.device("cuda"))
    found["our loop on our cache, deterministic"] = (
        statistics.median(epoch.images_per_second for epoch in epochs),
        utilisation,
    )
    name, base = torch.cuda.get_device_name(), found["fp32"][0]
    figures = [
        Figure(f"images/s of {MODEL}, {variant}", speed, "", f"fp32 on {name}", base, speed / base, None, None)
        for variant, (speed, _samples) in found.items()
    ]
    figures += [
        share(f"GPU utilisation, {MODEL}, {variant}", statistics.mean(samples))
        for variant, (_speed, samples) in found.items()
        if samples
    ]
    waited = 100 * statistics.median(epoch.data_wait_share for epoch in epochs)
    return [*figures, share(f"waiting for batches, {MODEL}, our loop on our cache", waited)]
