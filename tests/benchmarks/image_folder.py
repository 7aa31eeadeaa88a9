"""Source folders for benchmarks: distinct JPEGs of varied size and detail, reproducible by number."""

import io
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
LONG_SIDES = (160, 240, 320, 480, 640, 800, 1024)
"""Longest sides in pixels, as in folders of photos from the web (Caltech-256: 100 to 1,000, median 320)."""


def _photos() -> list[Path]:
    named = os.environ.get("LAKEVISION_TEST_DATA")
    folder = Path(named or ".") / "photos"
    return sorted(folder.glob("*/*.jpg"))[:400] if named and folder.is_dir() else []


def _image(number: int, photos: list[Path]) -> bytes:
    """Return a JPEG: a crop of a photo, or without photos a smooth gradient with noise."""
    generator = np.random.default_rng(number)
    long_side = int(generator.choice(LONG_SIDES))
    short_side = int(long_side * generator.uniform(0.6, 1.0))
    size = (long_side, short_side) if generator.random() < 0.6 else (short_side, long_side)
    if photos:
        with Image.open(photos[int(generator.integers(len(photos)))]) as photo:
            left, top = (generator.uniform(0.0, 0.3) * length for length in photo.size)
            box = (left, top, photo.width * generator.uniform(0.7, 1.0), photo.height * generator.uniform(0.7, 1.0))
            image = photo.convert("RGB").resize(size, Image.Resampling.BICUBIC, box=box)
    else:
        coarse = generator.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        noise = generator.integers(-12, 13, size=smooth.shape, dtype=np.int16)
        image = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=int(generator.integers(75, 96)))
    return buffer.getvalue()


def _write(folder: str, begin: int, end: int) -> None:
    photos = _photos()
    for number in range(begin, end):
        place = Path(folder) / f"class-{number % CLASSES:02d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").write_bytes(_image(number, photos))


def write_images(folder: Path, count: int, first: int = 0) -> None:
    """Write `count` JPEGs into class folders below `folder`, numbered from `first`."""
    step = 250
    with ProcessPoolExecutor() as pool:
        begins = range(first, first + count, step)
        list(pool.map(_write, *zip(*((str(folder), b, min(b + step, first + count)) for b in begins), strict=True)))
