"""Figures for a text that is kept in a database: smaller JPEG renditions of those that are too large for it."""

import base64
import io
from collections.abc import Mapping

from PIL import Image

WIDTHS = (1600, 1200, 1000, 800, 640, 480, 320, 240)
"""Pixels that are tried one after the other; a figure is never made larger."""

QUALITIES = (85, 70)
"""Of JPEG, tried at each width: below them letters blur sooner than from fewer pixels."""


def fit_images(images: Mapping[str, bytes], max_bytes: int) -> dict[str, str]:
    """Return images as data URIs, of at most `max_bytes` together before they are encoded as text.

    Each has a fair share: what a small one does not need is the larger ones'. One that is too large,
    and that no rendition of fits, is left out.

    Args:
        images: PNG files by name.
        max_bytes: Of all together.
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
    """Return the widest JPEG rendition of at most `max_bytes`, or None where there is none."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            whole = opened.convert("RGB")  # Figures are opaque, and JPEG knows no transparency.
    except OSError:  # What Pillow raises of a file that is no image, or half a one.
        return None
    for width in (whole.width, *(width for width in WIDTHS if width < whole.width)):
        scaled = whole.resize((width, max(1, round(whole.height * width / whole.width))), Image.Resampling.LANCZOS)
        for quality in QUALITIES:
            buffer = io.BytesIO()
            scaled.save(buffer, "JPEG", quality=quality, optimize=True)
            if buffer.tell() <= max_bytes:
                return buffer.getvalue()
    return None
