"""Peer of serve.py: the forward pass of decoded images in batches of 32 with all cores.

Run: `serve_bare.py FOLDER IMAGE SECONDS`; prints images per second.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.decode import decode_pixels

BATCH = 32


def main(folder: str, image: str, seconds: str) -> None:
    """Print the images per second of the forward pass."""
    classifier = ImageClassifier.load(Path(folder))
    pixels = decode_pixels(Path(image).read_bytes(), classifier.image_size)
    batch = torch.from_numpy(np.stack([pixels] * BATCH))
    for _warm_up in range(3):
        classifier.logits(batch)
    began, num = time.perf_counter(), 0
    while time.perf_counter() - began < float(seconds):
        classifier.logits(batch)
        num += BATCH
    print(num / (time.perf_counter() - began))


if __name__ == "__main__":
    main(*sys.argv[1:])
