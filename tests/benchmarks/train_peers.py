"""A training loop in a separate process: trains per line on stdin, and prints the time on stdout.

Run by tests/benchmarks/train.py as `train_peers.py NAME FOLDER`; the line `go` starts a round. All loops train the
same full network.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil
import torch
import torchvision
from torch import nn

BATCH_SIZE = 32
NUM_WORKERS = 2
STEPS = 6
POLL_SECONDS = 0.3
"""Interval between two samples of the workers' CPU time: much longer than a busy process needs to use some."""
LEARNING_RATE = 1e-3
CLASSES = 10
MODEL = "mobilenet_v2"

Run = Callable[[int], None]
"""A function that trains a number of steps."""


def ours(folder: Path, precision: str) -> Run:
    """Return our loop on our cache."""
    from tasks.cache.loader import Batch, CacheLoader
    from tasks.cache.manifest import read_manifest
    from tasks.config.recipe import values_of
    from tasks.config.train import TrainConfig
    from tasks.model.device import make_optimizer
    from tasks.model.precision import choose_precision
    from tasks.model.training_network import build_classifier
    from tasks.train.loop import train_one_epoch
    from tests.fakes.tiny_training import loop_of

    device = torch.device("cpu")
    manifest = read_manifest(str(folder / "uint8"))
    assert manifest is not None
    train = TrainConfig(model=MODEL, weights="none", freeze_backbone=False, batch_size=BATCH_SIZE)
    classifier = build_classifier(MODEL, "none", CLASSES, freeze_backbone=False)
    classifier = classifier.to(memory_format=torch.channels_last)
    classifier.precision = choose_precision(precision, device)
    optimizer = make_optimizer(values_of(train, {"learning_rate": LEARNING_RATE}), classifier)

    class Steps(CacheLoader):
        wanted = 0

        @property
        def num_steps(self) -> int:
            return self.wanted

        def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
            return islice(super().epoch(number, start), self.wanted)

    loader = Steps(str(folder / "uint8"), manifest, "train", BATCH_SIZE, seed=1)
    epochs = iter(range(1_000_000))

    def run(steps: int) -> None:
        loader.wanted = steps
        train_one_epoch(classifier, loader, optimizer, loop_of(lambda step: LEARNING_RATE, device=device), next(epochs))

    return run


def image_folder(folder: Path) -> "torch.utils.data.DataLoader[Any]":
    """Return torchvision's ImageFolder under a DataLoader, as in its reference scripts."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
            v2.ToPureTensor(),
        ]
    )
    return torch.utils.data.DataLoader(
        ImageFolder(str(folder / "files"), transform=transform),
        BATCH_SIZE,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
    )


def network(*, channels_last: bool) -> nn.Module:
    """Return the network that the peers train."""
    model: nn.Module = torchvision.models.get_model(MODEL, weights=None, num_classes=CLASSES)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def reference(folder: Path, *, same: bool) -> Run:
    """Return the loop of torchvision's references: zero, forward, loss, backward, step, and its meters.

    Args:
        folder: The folder of images.
        same: Whether to use our precision and memory format, and not the defaults float32 and NCHW.
    """
    from tasks.model_package.serving import computes_bf16

    model = network(channels_last=same)
    loader = image_folder(folder)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    bf16 = same and computes_bf16(torch.device("cpu"))

    def run(steps: int) -> None:
        model.train()
        for given, target in islice(loader, steps):
            image = given.contiguous(memory_format=torch.channels_last) if same else given
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = model(image)
                loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Meters: loss, top-1 and top-5 accuracy per step.
            loss.item()
            ranked = output.topk(5).indices == target[:, None]
            ranked[:, :1].sum().item(), ranked.sum().item()

    return run


def lightning(folder: Path, *, same: bool) -> Run:
    """Return Lightning's trainer without logging; runs in its own environment."""
    import lightning as L

    sys.path.insert(0, str(ROOT))
    bf16 = same and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

    class Module(L.LightningModule):  # type: ignore[misc]  # no types
        def __init__(self) -> None:
            super().__init__()
            self.model = network(channels_last=same)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            image, target = batch
            if same:
                image = image.contiguous(memory_format=torch.channels_last)
            return nn.functional.cross_entropy(self.model(image), target)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    module, loader = Module(), image_folder(folder)

    def run(steps: int) -> None:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            precision="bf16-mixed" if bf16 else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)

    return run


PEERS: dict[str, Callable[[Path], Run]] = {
    "ours": lambda folder: ours(folder, "auto"),
    "ours_fp32": lambda folder: ours(folder, "fp32"),
    "reference": lambda folder: reference(folder, same=False),
    "reference_same": lambda folder: reference(folder, same=True),
    "lightning": lambda folder: lightning(folder, same=False),
    "lightning_same": lambda folder: lightning(folder, same=True),
}


def settle() -> None:
    """Wait until the workers stop prefetching, which would slow the next peer down."""
    seen = -1.0
    while (used := seconds_of_workers()) > seen:
        seen = used
        time.sleep(POLL_SECONDS)


def seconds_of_workers() -> float:
    """Return the CPU time of this process's workers, in seconds."""
    used = 0.0
    for worker in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # The worker ended meanwhile.
            used += sum(worker.cpu_times()[:2])
    return used


def main() -> None:
    """Train some steps per line on stdin, and answer with their time in seconds."""
    warnings.filterwarnings("ignore")
    name, folder = sys.argv[1], Path(sys.argv[2])
    from tasks.system.cores import num_cores

    torch.set_num_threads(num_cores())
    torch.manual_seed(1)
    run = PEERS[name](folder)
    answers = sys.stdout
    sys.stdout = sys.stderr
    run(2)  # Warm-up: imports, workers, the first allocation.
    for _line in sys.stdin:
        began = time.perf_counter()
        run(STEPS)
        seconds = time.perf_counter() - began
        settle()
        print(json.dumps({"images": STEPS * BATCH_SIZE, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
