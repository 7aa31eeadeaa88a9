"""Prepared phases of a small network, as in single-process training."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer
from tasks.config.cache import CacheConfig
from tasks.config.recipe import phases_of
from tasks.config.storage import StorageConfig
from tasks.config.train import TrainConfig
from tasks.model.training_network import build_classifier
from tasks.refs import CacheRef
from tasks.storage import resolve_storage
from tasks.train.context import TrainingContext
from tasks.train.phases import Trainable, prepare_phase
from tasks.train.progress import EarlyStopping, Progress
from tasks.train.spec import TrainingSpec
from tests.builders.caches import write_cache
from tests.builders.small_network import SMALL
from tests.fakes.tiny_training import CPU


def context_of(cache: CacheRef, **settings: object) -> TrainingContext:
    """Return the context of a single-process run before its first phase, with cached features next to the cache."""
    defaults = {"model": SMALL, "batch_size": 6, "reference_batch_size": 6, "precision": "fp32", "recipe": "given"}
    train = TrainConfig.model_validate(defaults | settings)
    manifest = open_cache(cache)
    torch.manual_seed(2)
    # Random weights are a substitute for pretrained ones.
    classifier = build_classifier(SMALL, "none", len(manifest.classes), train.trained != "all")
    folder = Path(cache.url).parent
    storage = resolve_storage(StorageConfig(home=str(folder / "home"), cache=str(folder / "features")))
    spec = TrainingSpec(train=train, cache=cache, storage=storage)
    return TrainingContext(spec, manifest, classifier, CPU, Reducer())


def start_progress(**position: Any) -> Progress:
    """Return the progress at the start of a training run, or at another position."""
    return Progress(EarlyStopping(patience=2, min_delta=0.0, higher_is_better=True), **position)


def prepare(context: TrainingContext, number: int = 0, **position: Any) -> Trainable:
    """Prepare a phase."""
    return prepare_phase(context, phases_of(context.spec.train)[number], start_progress(**position))


def labelled_cache(folder: Path, **labels: list[int]) -> CacheRef:
    """Write a cache of noise with these labels of three classes in each split."""
    return write_cache(
        str(folder),
        {split: len(of_split) for split, of_split in labels.items()},
        lambda split, row: (
            np.random.default_rng(row).integers(0, 256, (32, 32, 3), dtype=np.uint8),
            labels[split][row],
        ),
        ("ant", "bee", "cat"),
        CacheConfig(image_size=32),
        rows_per_group=3,
        groups_per_file=2,
    )
