"""Figures as data URIs of bounded size, with smaller JPEG versions of those that are too large."""

import base64
import io
from collections.abc import Mapping

from PIL import Image

WIDTHS = (1600, 1200, 1000, 800, 640, 480, 320, 240)
"""Widths in pixels, tried in this order; a figure is never enlarged."""

QUALITIES = (85, 70)
"""JPEG qualities, tried at each width; lower ones blur letters more than fewer pixels do."""


def fit_images(images: Mapping[str, bytes], max_bytes: int) -> dict[str, str]:
    """Return images as data URIs, of at most `max_bytes` together before the base64 encoding.

    Each image has an equal share, and larger images get what smaller ones do not need. An image is left out if no
    JPEG version of it fits.

    Args:
        images: Contents of PNG files, by name.
        max_bytes: Maximum size of all images together.
    """
    found: dict[str, str] = {}
    left = max_bytes
    smallest_first = sorted(images, key=lambda name: len(images[name]))
    for number, name in enumerate(smallest_first):
        share = left // (len(images) - number)
        if len(images[name]) <= share:
            kind, content = "png", images[name]
        elif (smaller := shrink(images[name], share)) is not None:
            kind, content = "jpeg", smaller
        else:
            continue
        left -= len(content)
        found[name] = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {name: found[name] for name in images if name in found}


def shrink(image: bytes, max_bytes: int) -> bytes | None:
    """Return the widest JPEG version of an image of at most `max_bytes`, or None if none fits or it is invalid."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            whole = opened.convert("RGB")  # Figures are opaque, and JPEG has no transparency.
    except OSError:  # Pillow's error for an invalid or truncated image.
        return None
    for width in (whole.width, *(width for width in WIDTHS if width < whole.width)):
        scaled = whole.resize((width, max(1, round(whole.height * width / whole.width))), Image.Resampling.LANCZOS)
        for quality in QUALITIES:
            buffer = io.BytesIO()
            scaled.save(buffer, "JPEG", quality=quality, optimize=True)
            if buffer.tell() <= max_bytes:
                return buffer.getvalue()
    return None
