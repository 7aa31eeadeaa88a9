"""Image decoding: from bytes to an image or a reason for quarantine, and from an image to pixels.

Cache, batch inference and serving all call `decode_pixels`, so that a model sees the same pixels as in training.

The structure of a file is limited before it is decoded. A small file can take hours to decode, even if `max_pixels`
limits its pixels. Each scan of a progressive JPEG covers all of them, and a header takes time per segment or chunk.
"""

import io
import logging
import re
import struct
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

logger = logging.getLogger("lakevision.decode")

WHITE = (255, 255, 255)

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
"""Formats that are decoded, whatever the file's extension; others of PIL's run programs (EPS: Ghostscript)."""

MAX_PIXELS = 89_478_485
"""PIL's own limit, a quarter of a gigabyte of RGB."""

MAX_SCANS = 100
"""Maximum scans of a JPEG. libjpeg's own scripts have 10 for colour and 18 for CMYK, and mozjpeg chooses from 64
candidates. libtiff has the same limit (JPEG_MAX_ALLOWED_SCAN_NUMBER)."""

MAX_SCANNED_PIXELS = 20 * MAX_PIXELS
"""Maximum pixels times scans of a JPEG: 20 scans of the largest image that PIL decodes, which take seconds."""

MAX_SEGMENTS = 5_000
"""Maximum segments before the first scan of a JPEG. A segment has up to 64 KB, a colour profile up to 255 segments."""

MAX_CHUNKS = 100_000
"""Maximum chunks of a PNG. Encoders write pixels in chunks of 8 KB or more."""

MAX_COMPRESSED = 32
"""Maximum chunks of a PNG with compressed text or a colour profile: each may expand from a kilobyte to a megabyte."""

MAX_RUN_LENGTH_PIXELS = 4 << 20
"""Maximum pixels of a run-length encoded BMP, which PIL decodes in Python at 0.13 s per million, even without data."""

MAX_TILE_PIXELS = 16 << 20
"""Maximum pixels of a TIFF's tile that is larger than the image: libtiff allocates a whole tile."""

MAX_COVERED = 8
"""Maximum number of times that the strips of a TIFF cover its pixels: one per channel, and PIL decodes six."""

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""A marker that libjpeg acts on: not a stuffed byte, a restart marker or a fill byte."""

_FIRST_WITH_LENGTH, _START, _END, _SCAN = 0xC0, 0xD8, 0xD9, 0xDA
_SCAN_BYTES = re.compile(rb"\xff\xda")

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


_SWAPS_SIDES = frozenset({5, 6, 7, 8})
"""Orientations whose transposition swaps width and height."""


class Reason(StrEnum):
    """Reason why a file is quarantined."""

    ZERO_BYTES = "zero_bytes"
    NOT_AN_IMAGE = "not_an_image"
    TRUNCATED = "truncated"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_MANY_PARTS = "too_many_parts"
    TOO_SMALL = "too_small"
    UNSUPPORTED_MODE = "unsupported_mode"
    UNREADABLE = "unreadable"
    LABEL_MISSING = "label_missing"
    LABEL_CONFLICT = "label_conflict"
    SPLIT_MISSING = "split_missing"
    SPLIT_CONFLICT = "split_conflict"


class BadImage(Exception):
    """The bytes of a file are not a usable image.

    Attributes:
        reason: Reason for quarantine, a value to count and filter by.
        detail: Details of the reason, a text for users.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def _jpeg_markers(content: bytes) -> Iterator[int]:
    """Yield the markers of a JPEG after the first, except those within segments and after its end."""
    place = 2
    while (found := _MARKER.search(content, place)) is not None:
        marker = found[0][1]
        yield marker
        if marker == _END:
            return
        place = found.end()
        # libjpeg continues directly after a reserved marker: a length there would hide scans.
        if marker >= _FIRST_WITH_LENGTH and marker != _START:
            place += int.from_bytes(content[place : place + 2], "big")


def _png_chunks(content: bytes) -> Iterator[bytes]:
    place = len(_PNG)
    while place + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        yield kind
        place += length + 12


def _header_problem(content: bytes) -> str | None:
    """Return the reason why the header of a file would take too long to read, or None."""
    if content.startswith(_JPEG):
        for number, marker in enumerate(_jpeg_markers(content)):
            if marker == _SCAN:
                break
            if number >= MAX_SEGMENTS:
                return f"a JPEG with more than {MAX_SEGMENTS} segments before its first scan"
    elif content.startswith(_PNG):
        compressed = 0
        for number, kind in enumerate(_png_chunks(content)):
            if number >= MAX_CHUNKS:
                return f"a PNG with more than {MAX_CHUNKS} chunks"
            compressed += kind in {b"zTXt", b"iTXt", b"iCCP"}
            if compressed > MAX_COMPRESSED:
                return f"a PNG with more than {MAX_COMPRESSED} chunks of compressed text and profiles"
    return None


def scan_problem(content: bytes, num_pixels: int) -> str | None:
    """Return the reason why the scans of a file with `num_pixels` would take too long to decode, or None."""
    allowed = min(MAX_SCANS, MAX_SCANNED_PIXELS // max(num_pixels, 1))
    # Within pixel data the byte FF is always stuffed, so this count is exact or, with thumbnails, too high.
    if not content.startswith(_JPEG) or next(islice(_SCAN_BYTES.finditer(content), allowed, None), None) is None:
        return None
    scans = 0
    for marker in _jpeg_markers(content):
        scans += marker == _SCAN
        if scans > allowed:
            return f"a JPEG of {num_pixels} pixels with more than {allowed} scans"
    return None


def _tile_problem(image: TiffImagePlugin.TiffImageFile) -> str | None:
    width, height = (image.tag_v2.get(tag) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH))
    if isinstance(width, int) and isinstance(height, int):
        # The sides of a tile are multiples of 16, so a tile may be slightly larger than the image.
        whole = (image.width + 15) * (image.height + 15)
        if width * height > max(MAX_TILE_PIXELS, whole):
            return f"a TIFF of {image.width}x{image.height} pixels with tiles of {width}x{height}"
    return None


def _layout_problem(image: Image.Image, num_bytes: int) -> str | None:
    """Return the reason why the pixels of an opened file would take too much time or memory, or None."""
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) else []
    num_pixels = image.width * image.height
    run_lengths = any(tile.codec_name == "bmp_rle" for tile in tiles)
    if run_lengths and (num_pixels > MAX_RUN_LENGTH_PIXELS or num_bytes > 2 * MAX_RUN_LENGTH_PIXELS):
        return (
            f"a BMP with run lengths of {num_pixels} pixels and {num_bytes} bytes, of which at most "
            f"{MAX_RUN_LENGTH_PIXELS} pixels and {2 * MAX_RUN_LENGTH_PIXELS} bytes are decoded"
        )
    if isinstance(image, TiffImagePlugin.TiffImageFile) and (problem := _tile_problem(image)) is not None:
        return problem
    boxes = (tile.extents or (0, 0, *image.size) for tile in tiles)
    covered = sum(max(right - left, 0) * max(lower - upper, 0) for left, upper, right, lower in boxes)
    if covered > MAX_COVERED * num_pixels:
        return f"a file of {num_pixels} pixels in {len(tiles)} strips that cover {covered}"
    return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode == "I":
        # 16 bits per sample: keep the upper 8. PIL's own conversion clips at 255, which turns an image white.
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


def _upright(image: Image.Image) -> tuple[Image.Image, bool]:
    """Transpose by the EXIF orientation; return the image, and whether width and height were swapped.

    PIL's own function also rewrites the other tags, and fails on invalid ones.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    # Damaged EXIF raises many kinds of errors; the pixels are intact, and only their orientation is unknown.
    except Exception as error:
        logger.debug("EXIF of an image cannot be read: %s", error)
        return image, False
    method = _TRANSPOSE_OF_ORIENTATION.get(orientation) if isinstance(orientation, int) else None
    return (image, False) if method is None else (image.transpose(method), orientation in _SWAPS_SIDES)


def decode_image(content: bytes, max_pixels: int = MAX_PIXELS, box: int | None = None) -> Image.Image:
    """Decode to RGB, upright by the EXIF orientation, with transparency on white; of an animation, the first frame.

    Args:
        content: A whole file in one of FORMATS.
        max_pixels: Maximum of width times height, read from the header before pixels are decoded.
        box: Side of the square into which the caller scales the result down, in pixels. A JPEG is then decoded at
            the nearest 1/2, 1/4 or 1/8 that is not smaller.

    Raises:
        BadImage: The bytes are not a usable image; it has the reason.
    """
    return decode_sized(content, max_pixels, box)[0]


def decode_sized(
    content: bytes, max_pixels: int = MAX_PIXELS, box: int | None = None, min_side: int = 1
) -> tuple[Image.Image, tuple[int, int]]:
    """Decode as `decode_image` does; return the image, and the width and height (pixels, upright) of the original.

    Args:
        content: As for `decode_image`.
        max_pixels: As for `decode_image`.
        box: As for `decode_image`.
        min_side: Minimum of width and height, in pixels, read from the header as well.

    Raises:
        BadImage: The bytes are not a usable image; it has the reason.
    """
    if not content:
        raise BadImage(Reason.ZERO_BYTES, "the file is empty")
    if (problem := _header_problem(content)) is not None:
        raise BadImage(Reason.TOO_MANY_PARTS, problem)
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(Reason.NOT_AN_IMAGE, f"no image format starts with {content[:8]!r}") from None
    except Image.DecompressionBombError as error:
        raise BadImage(Reason.TOO_MANY_PIXELS, str(error)) from None
    except Exception as error:  # PIL's plugins report a damaged header as struct, index, key and other errors.
        raise BadImage(Reason.TRUNCATED, f"{type(error).__name__}: {error}") from None
    if image.width * image.height > max_pixels:
        raise BadImage(Reason.TOO_MANY_PIXELS, f"{image.width}x{image.height} is more than {max_pixels} pixels")
    if min(image.size) < min_side:
        raise BadImage(Reason.TOO_SMALL, f"{image.width}x{image.height} has a side below {min_side} pixels")
    problem = scan_problem(content, image.width * image.height) or _layout_problem(image, len(content))
    if problem is not None:
        raise BadImage(Reason.TOO_MANY_PARTS, problem)
    width, height = image.size
    try:
        if box is not None and image.format == "JPEG" and max(image.size) > box:
            # By the final sides and not the box: a wide image may be decoded at 1/2 long before both its sides are
            # twice the box.
            image.draft("RGB", fitted_size(image.size, box))
        image.load()
    # PIL reports damage after the header with different exceptions, depending on the format.
    except Exception as error:
        raise BadImage(Reason.TRUNCATED, f"{type(error).__name__}: {error}") from None
    upright, swapped = _upright(image)
    return _to_rgb(upright), (height, width) if swapped else (width, height)


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


def decode_pixels(content: bytes, side: int) -> npt.NDArray[np.uint8]:
    """Decode and letterbox: the only function from a source file's bytes to pixels.

    Returns:
        uint8 array of shape (side, side, 3), HWC.

    Raises:
        BadImage: As `decode_image`. The size settings of the ETL are not enforced again: they apply at ingestion.
    """
    return letterbox(decode_image(content, max_pixels=2 * MAX_PIXELS, box=side), side)


def encode_jpeg(image: Image.Image, quality: int, subsampling: Literal["4:4:4", "4:2:0"]) -> bytes:
    """Encode as JPEG with a quality on libjpeg's scale, and chroma at full or half resolution."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality, subsampling=subsampling)
    return buffer.getvalue()
