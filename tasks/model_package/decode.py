"""Image decoding: from bytes to an image or a reason for quarantine, and from an image to pixels.

Cache, batch inference and serving all call `decode_pixels`, so that a model sees the same pixels as in training.
"""

import io
import logging
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from .colours import in_srgb
from .description import NEWEST, Decoding
from .reasons import BadImage, Reason, refusal
from .samples import deep_mode, to_eight_bits
from .structure import (
    FORMATS,
    JPEG,
    MAX_DEPTH,
    MAX_JPEG2000_PIXELS,
    MAX_PIXELS,
    format_of,
    header_problem,
    layout_problem,
    sample_depth,
    scan_problem,
    without_metadata,
)

logger = logging.getLogger("lakevision.decode")

WHITE = (255, 255, 255)

_TRANSPOSE_OF_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that makes an image upright, by EXIF orientation (tag 0x0112, Exif 2.32, section 4.6.4)."""

_KEEPS_SIDES = frozenset({Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180})


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode == "I":
        # Version 1 keeps the upper 8 of 16 bits. PIL's own conversion clips at 255, which turns an image white.
        samples = np.asarray(image).astype(np.uint32)
        return Image.fromarray((samples >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, WHITE)
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    if image.mode in ("1", "L", "P", "CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB")
    raise BadImage(Reason.UNSUPPORTED_MODE, f"pixel mode {image.mode}")


def _transposition(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes an image upright by its EXIF orientation, or None.

    PIL's own function also rewrites the other tags, and fails on invalid ones.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    # Damaged EXIF raises many kinds of errors; the pixels are intact, and only their orientation is unknown.
    except Exception as error:
        logger.debug("EXIF of an image cannot be read: %s", error)
        return None
    return _TRANSPOSE_OF_ORIENTATION.get(orientation) if isinstance(orientation, int) else None


def decode_image(
    content: bytes, max_pixels: int = MAX_PIXELS, box: int | None = None, decoding: Decoding = NEWEST
) -> Image.Image:
    """Decode to RGB, upright by the EXIF orientation, with transparency on white; of an animation, the first frame.

    Args:
        content: A whole file in one of FORMATS.
        max_pixels: Maximum of width times height, read from the header before pixels are decoded.
        box: Side of the square into which the caller scales the result down, in pixels. A JPEG is then decoded at
            the nearest 1/2, 1/4 or 1/8 that is not smaller.
        decoding: Version and settings.

    Raises:
        BadImage: The bytes are not a usable image; it has the reason.
    """
    return decode_sized(content, max_pixels, box, decoding=decoding)[0]


Sized = tuple[Image.Image, tuple[int, int]]
"""An RGB image, upright, and the width and height (pixels, upright) of the original."""


def _open(content: bytes, max_pixels: int, min_side: int) -> ImageFile.ImageFile:
    """Open a file without decoding its pixels.

    Raises:
        BadImage: It is outside of the limits.
        Exception: PIL cannot open it.
    """
    if (problem := header_problem(content)) is not None:
        raise BadImage(Reason.TOO_MANY_PARTS, problem)
    if (name := format_of(content)) not in FORMATS:
        raise UnidentifiedImageError
    if name == "HEIF" and name not in Image.OPEN:
        import pi_heif  # Here: the parser of an uncommon format is loaded for its files alone.

        pi_heif.register_heif_opener()
    try:
        image = Image.open(io.BytesIO(content), formats=(name,))
    except Image.DecompressionBombError as error:
        raise BadImage(Reason.TOO_MANY_PIXELS, str(error)) from None
    if name == "JPEG2000":
        max_pixels = min(max_pixels, MAX_JPEG2000_PIXELS)
    if image.width * image.height > max_pixels:
        raise BadImage(Reason.TOO_MANY_PIXELS, f"{image.width}x{image.height} is more than {max_pixels} pixels")
    if name == "JPEG2000" and (depth := sample_depth(content)) > MAX_DEPTH:
        raise BadImage(Reason.UNSUPPORTED_MODE, f"samples of {depth} bits in a JPEG 2000: convert it to TIFF")
    if min(image.size) < min_side:
        raise BadImage(Reason.TOO_SMALL, f"{image.width}x{image.height} has a side below {min_side} pixels")
    problem = scan_problem(content, image.width * image.height) or layout_problem(image, len(content))
    if problem is not None:
        raise BadImage(Reason.TOO_MANY_PARTS, problem)
    return image


def _decode(content: bytes, max_pixels: int, min_side: int, decoding: Decoding, box: int | None = None) -> Sized:
    """Decode a file; at a reduced scale where `box` allows it.

    Raises:
        BadImage: It is outside of the limits, or has samples that cannot be shown.
        Exception: PIL cannot decode it.
    """
    image = _open(content, max_pixels, min_side)
    size, deep = image.size, deep_mode(image) if decoding.version > 1 else None
    if box is not None and image.format == "JPEG" and max(size) > box:
        # By the final sides and not the box: a wide image may be decoded at 1/2 long before both its sides are twice
        # the box.
        image.draft("RGB", fitted_size(size, box))
    profile = image.info.get("icc_profile") if decoding.version > 2 else None
    image.load()
    shallow = image if deep is None else to_eight_bits(image, content, deep, decoding.sample_bits)
    rgb = _to_rgb(shallow)
    if profile:
        rgb = in_srgb(shallow, rgb, profile)
    if (method := _transposition(image)) is None:
        return rgb, size
    upright = rgb.transpose(method)
    return upright, size if method in _KEEPS_SIDES else size[::-1]


def _decode_otherwise(content: bytes, max_pixels: int, min_side: int, decoding: Decoding, error: Exception) -> Sized:
    """Decode a file of which `_decode` could not: at its full scale, else without its metadata.

    libjpeg decodes a lossless JPEG at its full scale only, and a damaged text does not change a pixel.

    Raises:
        BadImage: Its pixels cannot be decoded; it has the reason.
    """
    at_full_scale = [content] if content.startswith(JPEG) else []
    for tried in dict.fromkeys([*at_full_scale, without_metadata(content)]):
        try:
            return _decode(tried, max_pixels, min_side, decoding)
        except (BadImage, MemoryError):
            raise
        except Exception as again:  # As in `decode_sized`.
            logger.debug("an image cannot be decoded: %s", again)
    raise refusal(content, error) from None


def decode_sized(
    content: bytes,
    max_pixels: int = MAX_PIXELS,
    box: int | None = None,
    min_side: int = 1,
    decoding: Decoding = NEWEST,
) -> Sized:
    """Decode as `decode_image` does; return the image, and the width and height (pixels, upright) of the original.

    Args:
        content: As for `decode_image`.
        max_pixels: As for `decode_image`.
        box: As for `decode_image`.
        min_side: Minimum of width and height, in pixels, read from the header as well.
        decoding: As for `decode_image`.

    Raises:
        BadImage: The bytes are not a usable image; it has the reason.
    """
    if not content:
        raise BadImage(Reason.ZERO_BYTES, "the file is empty")
    try:
        try:
            return _decode(content, max_pixels, min_side, decoding, box)
        except (BadImage, MemoryError):
            raise
        except Exception as error:  # PIL reports damage with many kinds of errors, depending on the format.
            return _decode_otherwise(content, max_pixels, min_side, decoding, error)
    except MemoryError:  # It says nothing about the file: ETL reads it again with its next run.
        raise BadImage(Reason.UNREADABLE, "memory ran out while it was decoded") from None


def fitted_size(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return width and height, scaled so that the longer one is `side` pixels and the aspect ratio is kept."""
    scale = side / max(size)
    width, height = (max(1, round(length * scale)) for length in size)
    return width, height


def fit_within(image: Image.Image, side: int) -> Image.Image:
    """Scale up or down so that the longest side is `side` pixels and the aspect ratio is kept."""
    size = fitted_size(image.size, side)
    return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)


def letterbox(image: Image.Image, side: int) -> npt.NDArray[np.uint8]:
    """Scale into a square of `side` pixels, centred on white.

    Returns:
        uint8 array of shape (side, side, 3).
    """
    fitted = fit_within(image, side)
    if fitted.size != (side, side):
        canvas = Image.new("RGB", (side, side), WHITE)
        canvas.paste(fitted, ((side - fitted.width) // 2, (side - fitted.height) // 2))
        fitted = canvas
    return np.asarray(fitted, dtype=np.uint8)


def decode_pixels(content: bytes, side: int, decoding: Decoding = NEWEST) -> npt.NDArray[np.uint8]:
    """Decode and letterbox: the only function from a source file's bytes to pixels.

    Returns:
        uint8 array of shape (side, side, 3), HWC.

    Raises:
        BadImage: As `decode_image`. The size settings of the ETL are not enforced again: they apply at ingestion.
    """
    return letterbox(decode_image(content, 2 * MAX_PIXELS, side, decoding), side)


def encode_jpeg(image: Image.Image, quality: int, subsampling: Literal["4:4:4", "4:2:0"]) -> bytes:
    """Encode as JPEG with a quality on libjpeg's scale, and chroma at full or half resolution."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality, subsampling=subsampling)
    return buffer.getvalue()
