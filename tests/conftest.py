"""Data made by the tests, and where real data may be found."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.config.storage import StorageConfig
from tasks.storage import Storage, resolve_storage

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def write_images(folder: Path, per_class: int, side: int = 24, first: int = 0) -> None:
    """Write noisy one-colour images into three class folders; no two are equal."""
    for label, colour in COLOURS.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + per_class):
            generator = np.random.default_rng((number, *colour))
            noise = generator.integers(-30, 30, size=(side, side, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number:03d}.png")


@pytest.fixture
def make_images(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of source folders with three classes."""

    def make(per_class: int = 20, side: int = 24, name: str = "source") -> Path:
        write_images(tmp_path / name, per_class, side)
        return tmp_path / name

    return make


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Return the storage of a run of its own."""
    return resolve_storage(StorageConfig(home=str(tmp_path / "home")))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a reader of what one logger said: a thread that an earlier test left behind may still be heard."""

    def read(logger: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == logger]

    return read


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder with photos and weights, which is no part of the project."""
    named = os.environ.get("LAKEVISION_TEST_DATA")
    if not named or not (Path(named) / "photos").is_dir() or not (Path(named) / "weights").is_dir():
        pytest.skip("LAKEVISION_TEST_DATA names no folder with photos/ and weights/")
    return Path(named).resolve()
