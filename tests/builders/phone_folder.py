"""A folder as phones leave it: HEIC and JPEG, movies, edits, screenshots, and what systems add."""

from pathlib import Path

import numpy as np
from PIL import Image

from tests.builders.colour_profiles import adobe_rgb
from tests.builders.image_bytes import encoded

IGNORED = ("beach/IMG_0100.MOV", "beach/IMG_0101.AAE", "forest/IMG_0200.MOV", "notes.txt")
"""Files of the folder without an image."""

LEFT_BY_SYSTEMS = (".DS_Store", "beach/._IMG_0001.HEIC", "forest/Thumbs.db")

PER_CLASS = 12
"""Photos in each of the two classes, of which one has HEIC alone."""


def photo(number: int, colour: tuple[int, int, int]) -> Image.Image:
    """Return a photo of noise around a colour; no two are equal."""
    noise = np.random.default_rng((number, *colour)).integers(-40, 40, (72, 96, 3))
    return Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8))


def write_phone_folder(folder: Path) -> Path:
    """Write the folder, and return it."""
    contents: dict[str, bytes] = {}
    for number in range(PER_CLASS):
        contents[f"beach/IMG_{number:04d}.HEIC"] = encoded(photo(number, (210, 190, 120)), "HEIC")
    kinds = (
        ("JPG", "JPEG", {}),
        ("jpeg", "JPEG", {"icc_profile": adobe_rgb()}),
        ("PNG", "PNG", {}),
        ("HEIC", "HEIC", {}),
    )
    for number in range(PER_CLASS):
        extension, kind, options = kinds[number % len(kinds)]
        contents[f"forest/IMG_{number:04d}.{extension}"] = encoded(photo(number, (40, 110, 50)), kind, **options)
    # A copy of a messenger, without an extension.
    contents["forest/received"] = contents.pop("forest/IMG_0011.HEIC")
    for path in (*IGNORED, *LEFT_BY_SYSTEMS):
        contents[path] = b"\0\0\0\x14ftypqt  \0\0\0\0qt  " if path.endswith(".MOV") else b"<?xml version='1.0'?>"
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
