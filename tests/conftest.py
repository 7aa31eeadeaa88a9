"""Fixtures of all tests: generated images, storage, log messages, signals and the folder of real data."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.config.storage import StorageConfig
from tasks.storage import Storage, resolve_storage
from tasks.system.signals import interrupt_on

# Three test files run at a time, and torch uses all cores in each. Threads that spin while they wait take the cores
# from the threads that they wait for. libgomp reads the variable when torch is loaded, here and in subprocesses.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def write_images(folder: Path, per_class: int, side: int = 24, first: int = 0) -> None:
    """Write noisy images of one colour per class into three class folders; no two are equal."""
    for label, colour in COLOURS.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + per_class):
            generator = np.random.default_rng((number, *colour))
            noise = generator.integers(-30, 30, size=(side, side, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number:03d}.png")


@pytest.fixture
def make_images(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that creates a source folder with three classes."""

    def make(per_class: int = 20, side: int = 24, name: str = "source") -> Path:
        write_images(tmp_path / name, per_class, side)
        return tmp_path / name

    return make


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Return a storage in a temporary home."""
    return resolve_storage(StorageConfig(home=str(tmp_path / "home")))


@pytest.fixture
def messages_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a function that returns the messages of one logger, since threads of earlier tests may log to others."""

    def read(logger: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == logger]

    return read


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder with photos and weights, which is not part of the project."""
    folder = os.environ.get("LAKEVISION_TEST_DATA")
    if not folder or not (Path(folder) / "photos").is_dir() or not (Path(folder) / "weights").is_dir():
        pytest.skip("LAKEVISION_TEST_DATA is not a folder with photos/ and weights/")
    return Path(folder).resolve()


@pytest.fixture
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt this process as Ctrl-C does, for the duration of a test."""
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
