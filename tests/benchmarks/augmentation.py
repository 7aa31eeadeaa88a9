"""Cost of the augmentation of the recipe auto on a CPU: training steps with it beside steps without it.

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
GOAL = 1.15


def main() -> None:
    """Run the benchmark, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three pairs")
    num_pairs = 3 if parser.parse_args().quick else 15
    torch.set_num_threads(num_cores())
    torch.manual_seed(1)
    device = torch.device("cpu")
    classifier = build_classifier(MODEL, "none", CLASSES, freeze_backbone=False).to(memory_format=torch.channels_last)
    classifier.precision = choose_precision("auto", device, SIDE)
    images = torch.randint(0, 256, (BATCH, SIDE, SIDE, 3), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (BATCH,))

    def step(augment: Augment | None) -> float:
        began = time.perf_counter()
        inputs, targets = (images, labels) if augment is None else augment(images, labels)
        functional.cross_entropy(classifier(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        classifier.zero_grad()
        return time.perf_counter() - began

    figures = []
    for name, settings in KINDS.items():
        augment = make_augment(settings, SIDE, CLASSES)
        for _warm in range(3):
            step(augment)
        pairs = [(step(augment), step(None)) for _pair in range(num_pairs)]
        mine, plain = (1000 / BATCH * statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        figures.append(
            Figure(f"training step with {name}", mine, "ms/image", "without", plain, ratio, GOAL, ratio <= GOAL)
        )
    write_figures("augmentation", figures, note=f"{MODEL} at {SIDE} pixels, batch {BATCH}, median of {num_pairs} pairs")


if __name__ == "__main__":
    main()
