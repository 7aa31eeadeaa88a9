"""Colours of an image with an ICC profile, as sRGB, which networks are trained on and screens show."""

import io
import logging
from functools import lru_cache
from itertools import product

import numpy as np
from PIL import Image, ImageCms

logger = logging.getLogger("lakevision.decode")

MAX_PROFILE_BYTES = 4 << 20
"""Size of the largest profile that is used: those of printers have up to 3 MB."""

SAME_LEVELS = 2
"""Largest difference of a level (0-255) in a profile that counts as sRGB: profiles of sRGB differ in rounding."""

_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""PIL's mode of an image by the colour space of its profile."""

_GRAY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")


def in_srgb(image: Image.Image, rgb: Image.Image, profile: bytes) -> Image.Image:
    """Return the pixels of an image as sRGB; those of a profile that is damaged, or of another kind, as they are.

    Args:
        image: The image in its own mode.
        rgb: The same in the mode RGB, without its profile, and with transparency on white.
        profile: Its ICC profile.
    """
    if len(profile) > MAX_PROFILE_BYTES or (found := _transform(profile)) is None:
        return rgb
    mode, transform = found
    if mode == "CMYK":
        return _applied(transform, image) if image.mode == "CMYK" else rgb
    if image.mode == "CMYK" or (mode == "L" and image.mode not in _GRAY):
        return rgb
    return _applied(transform, rgb.getchannel(0) if mode == "L" else rgb)


def _applied(transform: ImageCms.ImageCmsTransform, image: Image.Image) -> Image.Image:
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None, "it is not in place"
    converted.info = {}  # with a profile, it would be converted again where it is stored
    return converted


@lru_cache(maxsize=8)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform] | None:
    """Return the mode of the images of a profile, and its transform to sRGB; None if it changes nothing.

    The intent is perceptual: of a printer's profile, white paper becomes white.
    """
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = _MODES.get(opened.profile.xcolor_space.strip())
        if mode is None:
            return None
        transform = ImageCms.buildTransform(
            opened, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.PERCEPTUAL
        )
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        logger.debug("a colour profile cannot be used: %s", error)
        return None
    if mode != "CMYK":
        levels = range(0, 256, 17)
        colours_NC = [*product(levels, repeat=3)] if mode == "RGB" else [(level,) for level in levels]
        before_NC = np.array(colours_NC, dtype=np.uint8)
        image = Image.fromarray(before_NC[None] if mode == "RGB" else before_NC.T)
        after_NC = np.asarray(ImageCms.applyTransform(image, transform))[0]
        if np.abs(after_NC.astype(int) - before_NC).max() <= SAME_LEVELS:
            return None
    return mode, transform
