"""Cost of the augmentation of the recipe auto: training steps with it beside steps without it.

On a GPU if there is one, else on the CPU.

Run: `make bench-augmentation`; BENCH_ARGS=--quick for fewer pairs.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.nn import functional

from tasks.config.augmentation import AugmentationConfig
from tasks.config.recipe import COLOUR, CROP
from tasks.model.augmentation import make_augment
from tasks.model.precision import choose_precision
from tasks.model.training_network import build_classifier
from tasks.system.cores import num_cores
from tasks.train.step import Augment
from tests.benchmarks.figures import Figure, write_figures

MODEL, SIDE, BATCH, CLASSES = "mobilenet_v2", 224, 32, 10
KINDS = {
    "crop, colour and mirroring of auto": AugmentationConfig(flip=True, resized_crop=CROP, colour=COLOUR),
    "RandAugment, 2 operations": AugmentationConfig(rand_augment=2),
}
GOALS = {"cpu": 1.15, "cuda": 1.1}


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three pairs")
    num_pairs = 3 if parser.parse_args().quick else 15
    torch.set_num_threads(num_cores())
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classifier = build_classifier(MODEL, "none", CLASSES, freeze_backbone=False).to(
        device, memory_format=torch.channels_last
    )
    classifier.precision = choose_precision("auto", device, SIDE)
    images = torch.randint(0, 256, (BATCH, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, CLASSES, (BATCH,), device=device)

    def step(augment: Augment | None) -> float:
        began = time.perf_counter()
        inputs, targets = (images, labels) if augment is None else augment(images, labels)
        functional.cross_entropy(classifier(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        classifier.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    figures, goal = [], GOALS[device.type]
    for name, settings in KINDS.items():
        augment = make_augment(settings, SIDE, CLASSES)
        for _warm in range(3):
            step(augment)
        pairs = [(step(augment), step(None)) for _pair in range(num_pairs)]
        mine, plain = (1000 / BATCH * statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        figures.append(
            Figure(f"training step with {name}", mine, "ms/image", "without", plain, ratio, goal, ratio <= goal)
        )
    write_figures(
        "augmentation",
        figures,
        note=f"{MODEL} at {SIDE} pixels on {device.type}, batch {BATCH}, median of {num_pairs} pairs",
    )


if __name__ == "__main__":
    main()
