"""Fixtures of the unit tests: a small cache without Spark, and a small network with its weights."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torchvision

from tasks.config.cache import CacheConfig
from tasks.model.training_network import Classifier, build_classifier
from tasks.refs import CacheRef
from tests.builders.caches import Pixels, noise, write_cache
from tests.builders.small_network import SMALL

CLASSES = ("ant", "bee", "cat")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one compute thread, with which networks this small are fastest."""
    torch.set_num_threads(1)


@pytest.fixture
def make_cache(tmp_path: Path) -> Callable[..., CacheRef]:
    """Return a function that writes a cache of noise: row i has label i mod 3 and pixels drawn from seed i."""

    def make(
        rows: Mapping[str, int],
        *,
        rows_per_group: int = 3,
        groups_per_file: int = 2,
        image_size: int = 16,
        folder: str = "cache",
        draw: Callable[[int, int], Pixels] = noise,
        **settings: object,
    ) -> CacheRef:
        return write_cache(
            str(tmp_path / folder),
            rows,
            lambda split, row: (draw(row, image_size), row % len(CLASSES)),
            CLASSES,
            CacheConfig.model_validate({"image_size": image_size} | settings),
            rows_per_group=rows_per_group,
            groups_per_file=groups_per_file,
        )

    return make


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a random state dict of SMALL, in place of pretrained weights."""
    torch.manual_seed(11)
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    torch.save(torchvision.models.get_model(SMALL, weights=None).state_dict(), path)
    return path


@pytest.fixture
def classifier(weights: Path) -> Classifier:
    """Return a classifier with a frozen backbone and a new head."""
    torch.manual_seed(2)
    return build_classifier(SMALL, str(weights), num_classes=3, freeze_backbone=True)
