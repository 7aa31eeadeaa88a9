"""Reasons why a file is quarantined, and the true reason of a file that Pillow cannot decode."""

import io
import re
from enum import StrEnum
from itertools import takewhile

from PIL import Image, TiffImagePlugin

from .structure import FORMATS, JP2, JPEG, PNG, SCAN, format_of, is_cut, jpeg_segments


class Reason(StrEnum):
    """Reason why a file is quarantined, or ignored (OTHER_FILE); ledgers have these values, so none is renamed."""

    ZERO_BYTES = "zero_bytes"
    NOT_AN_IMAGE = "not_an_image"
    UNSUPPORTED_FORMAT = "unsupported_format"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_MANY_PARTS = "too_many_parts"
    TOO_SMALL = "too_small"
    UNSUPPORTED_MODE = "unsupported_mode"
    UNKNOWN_RANGE = "unknown_range"
    UNREADABLE = "unreadable"
    OTHER_FILE = "other_file"
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


_BEGINNINGS = (JPEG, PNG, b"GIF87a", b"GIF89a", b"RIFF", b"II*\0", b"MM\0*", JP2)
"""Signatures of which a file that was cut within them has a part."""

_UNSUPPORTED_FRAMES = dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical JPEG") | {
    0xCB: "lossless JPEG with arithmetic coding",
    0xF7: "JPEG-LS",
}
"""Variants of JPEG that libjpeg does not decode, by the marker of the frame."""

_IS_UNSUPPORTED = re.compile("cannot handle|[Uu]nsupported|unknown pixel mode|unknown data organization|^KeyError")
"""Texts of PIL's errors about a sound header of a variant that PIL does not decode."""

_IS_TRUNCATED = re.compile(
    "image file is truncated|Truncated File Read|Truncated data|Expected to read|End of file|outside of file"
)


class _EndingFile(io.BytesIO):
    """A file that notes whether more was read than it has."""

    has_ended = False

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.has_ended |= size is not None and size > len(found)
        return found


def refusal(content: bytes, error: Exception) -> BadImage:
    """Return the true reason why PIL cannot decode a file.

    Args:
        content: The file.
        error: The error with which PIL opened it or loaded its pixels.
    """
    name = format_of(content)
    if name is None and len(content) > 2 and any(start.startswith(content) for start in _BEGINNINGS):
        return BadImage(Reason.TRUNCATED, f"the file ends after {len(content)} bytes")
    if name is None:
        return BadImage(Reason.NOT_AN_IMAGE, f"no image format starts with {content[:8]!r}")
    if (variant := _unsupported_variant(content, name)) is not None:
        return BadImage(Reason.UNSUPPORTED_FORMAT, f"{variant}, which is not decoded: convert it to JPEG or PNG")
    file = _EndingFile(content)
    image: Image.Image | None = None
    try:
        # PIL's plugin itself: `Image.open` hides its error.
        image = Image.OPEN[name][0](file, "")
    except Exception as hidden:  # As various as those that are caught around `Image.open`.
        error = hidden
    text = f"{type(error.__cause__ or error).__name__}: {error}".removeprefix("SyntaxError: ")
    if _IS_TRUNCATED.search(text) or file.has_ended or _ends_early(content, name, image):
        return BadImage(Reason.TRUNCATED, f"the {name} ends after {len(content)} bytes, before its image does")
    if _IS_UNSUPPORTED.search(text):
        return BadImage(Reason.UNSUPPORTED_FORMAT, f"{name} of a kind that is not decoded ({text})")
    return BadImage(Reason.DAMAGED, f"the {name} is damaged ({text})")


def _unsupported_variant(content: bytes, name: str) -> str | None:
    """Return the name of a format, or of a variant of JPEG, that is never decoded, or None."""
    if name not in FORMATS:
        return name
    markers = (marker for marker, _start, _end in jpeg_segments(content)) if name == "JPEG" else iter(())
    before_scan = takewhile(lambda marker: marker != SCAN, markers)
    return next((_UNSUPPORTED_FRAMES[marker] for marker in before_scan if marker in _UNSUPPORTED_FRAMES), None)


def _ends_early(content: bytes, name: str, image: Image.Image | None) -> bool:
    """Return whether a file is shorter than its header says."""
    if name in {"AVIF", "HEIF", "JPEG2000"}:
        return is_cut(content)
    if name == "WEBP":
        return len(content) < int.from_bytes(content[4:8], "little") + 8
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    offsets, counts = (
        image.tag_v2.get(tag, ()) for tag in (TiffImagePlugin.STRIPOFFSETS, TiffImagePlugin.STRIPBYTECOUNTS)
    )
    # In a damaged file they may be of another type.
    strips = [pair for pair in zip(offsets, counts, strict=False) if all(isinstance(number, int) for number in pair)]
    return any(offset + count > len(content) for offset, count in strips)
