"""The built-in digits as image files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tasks.etl.source import NUM_DIGITS, write_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all digits, written once."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


def test_every_digit_is_in_its_class_folder(digits: Path) -> None:
    """There are ten folders with 1,797 PNG files, and no other files."""
    assert sorted(folder.name for folder in digits.iterdir()) == [str(number) for number in range(10)]
    files = [file for file in digits.rglob("*") if file.is_file()]
    assert len(files) == NUM_DIGITS
    assert all(file.suffix == ".png" for file in files)


def test_pixels_are_scikit_learns_levels_scaled(digits: Path) -> None:
    """Level 0 is black, level 16 is white, and the folder is the label."""
    source = load_digits()

    pixels = np.asarray(Image.open(digits / str(source.target[5]) / "0005.png"))

    assert pixels.shape == (8, 8)
    assert np.array_equal(pixels, np.rint(source.images[5] * 255 / 16).astype(np.uint8))


def test_writing_again_changes_nothing(digits: Path) -> None:
    """A second run modifies none of the files, so that the ETL does not read them again."""
    before = {file: file.stat().st_mtime_ns for file in digits.rglob("*.png")}

    write_digits(digits)

    assert {file: file.stat().st_mtime_ns for file in digits.rglob("*.png")} == before


def test_interrupted_writing_is_completed(digits: Path, tmp_path: Path) -> None:
    """Missing files are written, and existing files are not modified, even if their content differs."""
    folder = tmp_path / "digits"
    shutil.copytree(digits, folder)
    files = sorted(folder.rglob("*.png"))
    missing, changed = files[0], files[1]
    content = missing.read_bytes()
    missing.unlink()
    changed.write_bytes(b"mine")

    write_digits(folder)

    assert missing.read_bytes() == content
    assert changed.read_bytes() == b"mine"
    assert sum(1 for _ in folder.rglob("*.partial")) == 0
