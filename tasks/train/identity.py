"""What makes two trainings the same: the name they share, and what a checkpoint must have in common with them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, listed
from tasks.model.pretrained import weights_digest
from tasks.refs import CacheRef
from tasks.tracking.runs import flat_params


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


def check_fits(content: dict[str, Any], config: dict[str, Any], classes: Sequence[str], folder: Path) -> None:
    """Refuse a checkpoint of another training.

    Args:
        content: The checkpoint.
        config: The `decisive_settings` of the training that would go on from it.
        classes: Names of that training's classes.
        folder: Where the checkpoint lies.

    Raises:
        WrongInput: Names what differs, in the checkpoint and here.
    """
    different = [
        f"classes only {where}: {listed(sorted(names)[:5], len(names))}"
        for where, names in (
            ("there", set(content["classes"]) - set(classes)),
            ("here", set(classes) - set(content["classes"])),
        )
        if names
    ]
    theirs, ours = flat_params(content["config"]), flat_params(config)
    settings = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    different += [f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here" for name in settings[:4]]
    if different:
        raise WrongInput(
            f"the checkpoint in '{folder}' is of another training ({'; '.join(different)}): train with its data and "
            "settings, or remove the files of that folder to begin anew"
        )
