"""Classifiers of encoded images in memory, without the files of a model package."""

from collections.abc import Sequence
from typing import Any

import torch

from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.description import FORMAT, NEWEST, Description
from tasks.model_package.network import ImageNetwork


def image_classifier(network: ImageNetwork, classes: Sequence[str], image_size: int, **given: Any) -> ImageClassifier:
    """Return a classifier on the CPU; the rest of its description is as `save_classifier` writes it."""
    description = {
        "format": FORMAT,
        "model": "resnet18",
        "classes": tuple(classes),
        "image_size": image_size,
        "precision": "float32",
        "temperature": 1.0,
        "decoding": NEWEST,
        "weights_sha256": 64 * "0",
    }
    return ImageClassifier(network, Description.model_validate(description | given), torch.device("cpu"))
