"""Identity of a training run: its key, and the settings that a checkpoint must share with it."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput, join_names
from tasks.model.pretrained import weights_digest
from tasks.refs import CacheRef


def run_key(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> str:
    """Return the key of a training run, a digest of everything that decides its result."""
    return key_of(decisive_settings(train, cache, distributed, repetition))


def run_keys(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> list[str]:
    """Return the keys by which a training run is found: its own, then that of older releases if it was another one.

    Older releases counted `TrainConfig.neutral` as settings that decide the result.
    """
    decisive = decisive_settings(train, cache, distributed, repetition)
    given = decisive["train"] | {name: getattr(train, name) for name in train.neutral}
    return list(dict.fromkeys([key_of(decisive), key_of(decisive | {"train": given})]))


def key_of(decisive: Mapping[str, Any]) -> str:
    """Return the key of `decisive_settings`."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def decisive_settings(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None
) -> dict[str, Any]:
    """Return the settings and data that decide the result; a checkpoint must have the same."""
    decisive: dict[str, Any] = {
        "cache": cache.digest,
        # By content: a changed file at the same path, or other weights of torchvision, make another run; the same
        # file at another path does not.
        "train": train.decisive() | {"weights": weights_digest(train.model, train.weights)},
        "ranks": None if distributed is None else distributed.decisive(),
    }
    if repetition is not None:
        decisive["repetition"] = repetition
    return decisive


def check_fits(
    content: dict[str, Any],
    config: dict[str, Any],
    classes: Sequence[str],
    folder: Path,
    neutral: Collection[str] = (),
) -> None:
    """Check that a checkpoint belongs to the training run that resumes from it.

    Args:
        content: The checkpoint.
        config: The `decisive_settings` of the training run.
        classes: Class names of the training run.
        folder: Folder of the checkpoint, for the message.
        neutral: Settings of `train` that may differ.

    Raises:
        WrongInput: Settings, data or classes differ; names the differences with both values.
    """
    from tasks.tracking.runs import flat_params  # Here: it loads MLflow, which a launcher's key does not need.

    different = [
        f"classes only in the {where}: {join_names(sorted(names)[:5], len(names))}"
        for where, names in (
            ("checkpoint", set(content["classes"]) - set(classes)),
            ("data", set(classes) - set(content["classes"])),
        )
        if names
    ]
    saved, current = flat_params(content["config"]), flat_params(config)
    compared = (saved.keys() | current.keys()) - {f"train.{name}" for name in neutral}
    settings = sorted(name for name in compared if saved.get(name) != current.get(name))
    different += [
        f"{name} is {saved.get(name)!r} in the checkpoint and {current.get(name)!r} now" for name in settings[:4]
    ]
    if different:
        raise WrongInput(
            f"the checkpoint in '{folder}' is of another training run ({'; '.join(different)}): train with its data "
            "and settings, or remove the files in that folder to start again"
        )
