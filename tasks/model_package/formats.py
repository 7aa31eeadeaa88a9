"""Formats of files by their first bytes: those that are decoded, and others that are found among images."""

import re
from collections.abc import Iterator

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "JPEG2000", "HEIF")
"""Formats that are decoded, by their names in PIL; others of PIL's run programs (EPS: Ghostscript)."""

HEAD_BYTES = 4096
"""Number of first bytes that tell whether a file without the name of an image is one."""

_SIGNATURES = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM",
    "WEBP": rb"RIFF....WEBP",
    "TIFF": rb"II([*+]\0|\0\*)|MM(\0[*+]|\*\0)",
    "JPEG2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "AVIF": rb"....ftyp(avi[fs]|m[is]f1.{4}(.{4}){0,12}?avi[fs])",
    "HEIF": rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "ICO": rb"\0\0[\x01\x02]\0[^\0]",
    "PNM": rb"P[1-7]\s",
    "PSD": rb"8BPS\0",
    "SVG": rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<![^>]*>\s*)*<svg\b",
    "PostScript": rb"%!PS",
    "PDF": rb"%PDF-",
    "OpenEXR": rb"v/1\x01",
    "DICOM": rb".{128}DICM",
}
"""First bytes of files, by format."""

_NEW_SUBFILE_TYPE, _DNG_VERSION = 254, 50706
_MOST_TAGS = 200
"""Tags of a raw photo's first directory: cameras write a few dozen."""

NO_IMAGE = "neither its name nor its content is that of an image"


def format_of(content: bytes) -> str | None:
    """Return the name of the format that a file's first bytes are of, or None."""
    return next((name for name, start in _SIGNATURES.items() if re.match(start, content[:1024], re.DOTALL)), None)


def other_content(head: bytes) -> str | None:
    """Return why a file without the name of an image is none that is decoded, or None if it is one.

    Args:
        head: Its first HEAD_BYTES bytes, or all.
    """
    name = format_of(head)
    if name is None or (name == "BMP" and head[6:10] != bytes(4)):  # Two letters alone begin many texts.
        return NO_IMAGE if head else "an empty file without the name of an image"
    if name == "TIFF" and _is_raw_photo(head):
        return "a camera's raw photo, which is not decoded"
    return None if name in FORMATS else f"{name}, which is not decoded"


def _is_raw_photo(head: bytes) -> bool:
    """Return whether a TIFF is a raw photo: CR2, DNG, or one whose first image is a reduced one."""
    return head[8:10] == b"CR" or any(
        tag == _DNG_VERSION or (tag == _NEW_SUBFILE_TYPE and value & 1) for tag, value in _first_tags(head)
    )


def _first_tags(head: bytes) -> Iterator[tuple[int, int]]:
    """Yield the tags of a TIFF's first directory and their values, as far as they are in its first bytes."""
    order = "little" if head[:1] == b"I" else "big"

    def number(place: int, size: int) -> int:
        return int.from_bytes(head[place : place + size], order)  # type: ignore[arg-type]  # one of two texts

    begin = number(4, 4)
    for place in range(begin + 2, begin + 2 + 12 * min(number(begin, 2), _MOST_TAGS), 12):
        yield number(place, 2), number(place + 8, 4)
