"""What makes two trainings the same: the name they share, and what a checkpoint must have in common with them."""

import hashlib
import json
from typing import Any

from tasks.config import DistributedConfig, TrainConfig
from tasks.refs import CacheRef
from tasks.train.model import weights_digest


def run_key(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> str:
    """Name a training by everything that decides its result, so that the same one is not trained twice."""
    decisive = decisive_settings(train, cache, distributed, repetition)
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def decisive_settings(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None
) -> dict[str, Any]:
    """Return what names a training, and what a checkpoint must have in common with it."""
    decisive: dict[str, Any] = {
        "cache": cache.digest,
        # By content: another file at the same path, or other weights of torchvision, are another training; the same
        # file elsewhere is the same.
        "train": train.decisive() | {"weights": weights_digest(train.model, train.weights)},
        "ranks": None
        if distributed is None
        else distributed.model_dump(include={"num_ranks", "scale_learning_rate", "warmup_epochs"}),
    }
    if repetition is not None:
        decisive["repetition"] = repetition
    return decisive
