"""One compute thread, and a tiny cache, written with the code that Spark tasks run, but without Spark."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tasks.config.cache import CacheConfig
from tasks.refs import CacheRef
from tests.caches import write_cache

CLASSES = ("ant", "bee", "cat")

Pixels = npt.NDArray[np.uint8]


def noise(row: int, side: int) -> Pixels:
    """Return pixels drawn from the row's number."""
    return np.random.default_rng(row).integers(0, 256, (side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Networks this small are slower on many threads than on one."""
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
