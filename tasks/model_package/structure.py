"""The structure of a file: its format, its limits before it is decoded, and the file without its metadata.

A small file can take hours to decode, even if `max_pixels` limits its pixels. Each scan of a progressive JPEG covers
all of them, and a header takes time per segment or chunk.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from itertools import islice

from PIL import Image, ImageFile, TiffImagePlugin

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

MAX_JPEG2000_PIXELS = 32 << 20
"""Maximum pixels of a JPEG 2000 file: OpenJPEG takes up to 23 bytes for each, 0.8 GB in all."""

MIN_PRECINCT, MIN_BLOCK, MIN_TILE, MAX_LAYERS = 1 << 9, 1 << 8, 1 << 10, 100
"""Minimum pixels for each precinct, code block and tile of a JPEG 2000 file, and its maximum layers.

Encoders write precincts of 128 or more a side, code blocks of 32 or 64, and 20 layers. OpenJPEG allocates each precinct
and each code block: with a side of two, an image of a megapixel takes 1.4 GB.
"""

FEW_PRECINCTS = 256
"""Precincts that a JPEG 2000 file may have whatever its size: each resolution has one."""

MAX_DEPTH = 8
"""Maximum bits of a sample of a JPEG 2000 file: PIL scales others by the stated range, which may be another one."""

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"

CODESTREAM, JP2, _END_OF_CODESTREAM = b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  ", b"\xff\xd9"
_SIZE, _CODING, _CODING_OF_COMPONENT, _START_OF_TILE, _START_OF_DATA = 0xFF51, 0xFF52, 0xFF53, 0xFF90, 0xFF93
"""Markers of a JPEG 2000 codestream."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""A marker that libjpeg acts on: not a stuffed byte, a restart marker or a fill byte."""

_FIRST_WITH_LENGTH, _START, _END, SCAN = 0xC0, 0xD8, 0xD9, 0xDA
_SCAN_BYTES = re.compile(rb"\xff\xda")

_METADATA = frozenset({*range(0xE0, 0xF0), 0xFE})
"""Markers of application data and comments."""

_COLOURS, _EXIF = frozenset({0xE0, 0xEE}), 0xE1
"""Markers of JFIF's and Adobe's segments, with the coding of colours, and of EXIF's."""

_LEAST_COLOURS = 16
"""Bytes of the shortest segment of JFIF or Adobe that libjpeg reads, with its marker."""


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


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the markers of a JPEG after the first, except those within segments and after its end.

    A segment is its marker, and the offsets of its first byte and after its last.
    """
    place = 2
    while (found := _MARKER.search(content, place)) is not None:
        marker, place = found[0][1], found.end()
        # libjpeg continues directly after a reserved marker: a length there would hide scans.
        if marker >= _FIRST_WITH_LENGTH and marker not in (_START, _END):
            place += int.from_bytes(content[place : place + 2], "big")
        yield marker, found.start(), place
        if marker == _END:
            return


def png_chunks(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the chunks of a PNG: type, and the offsets of its first byte and after its last."""
    place = len(PNG)
    while place + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        yield kind, place, place + length + 12
        place += length + 12


def _boxes(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes of an HEIF, AVIF or JPEG 2000 file (ISO 14496-12): kind, the offsets of its data and after it."""
    place = 0
    while place + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        begin = place + 8
        if length == 1:
            length, begin = int.from_bytes(content[begin : begin + 8], "big"), begin + 8
        # 0: it extends to the end of the file; other lengths below that of the header are damaged
        place = place + length if place + length >= begin else len(content)
        yield kind, begin, place


def is_cut(content: bytes) -> bool:
    """Return whether an HEIF, AVIF or JPEG 2000 file ends before its codestream, or before its last box does."""
    if content.startswith(CODESTREAM):
        return not content.endswith(_END_OF_CODESTREAM)
    return max((end for _kind, _begin, end in _boxes(content)), default=0) != len(content)


def codestream_segments(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the markers and segments of a JPEG 2000 file, of its header and of its tiles (ISO 15444-1, annex A)."""
    in_box = (begin for kind, begin, _end in _boxes(content) if kind == b"jp2c")
    place = 0 if content.startswith(CODESTREAM) else next(in_box, len(content))
    place, end_of_tile = place + 2, len(content)
    while place + 4 <= len(content):
        marker, length = struct.unpack_from(">HH", content, place)
        if marker == _START_OF_TILE:
            end_of_tile = place + (int.from_bytes(content[place + 6 : place + 10], "big") or len(content))
        if marker == _START_OF_DATA:
            place = max(end_of_tile, place + 2)
            continue
        yield marker, content[place + 4 : place + 2 + length]
        place += 2 + max(length, 2)


def _codestream_problem(content: bytes) -> str | None:
    """Return the reason why a JPEG 2000 file would take too much memory, or None."""
    width = height = 0
    for number, (marker, segment) in enumerate(codestream_segments(content)):
        if number >= MAX_CHUNKS:
            return f"a JPEG 2000 with more than {MAX_CHUNKS} segments"
        if marker == _SIZE and len(segment) > 36:
            right, lower, left, upper, tile_width, tile_height = struct.unpack_from(">6I", segment, 2)
            width, height = right - left, lower - upper
            if tile_width * tile_height < min(MIN_TILE, width * height):
                return f"a JPEG 2000 with tiles of {tile_width}x{tile_height}"
        elif marker in (_CODING, _CODING_OF_COMPONENT):
            # The coding of a component has its number first, and neither order nor layers.
            coding = segment if marker == _CODING else segment[1:2] + bytes(4) + segment[2:]
            if (layers := int.from_bytes(coding[2:4], "big")) > MAX_LAYERS:
                return f"a JPEG 2000 with {layers} layers"
            if len(coding) > 9 and 1 << min(coding[6] + coding[7] + 4, 32) < MIN_BLOCK:
                return f"a JPEG 2000 with code blocks of less than {MIN_BLOCK} pixels"
            if (
                coding[:1]
                and coding[0] & 1
                and _num_precincts(width, height, coding) > FEW_PRECINCTS + (width * height // MIN_PRECINCT)
            ):
                return f"a JPEG 2000 with precincts of less than {MIN_PRECINCT} pixels"
    return None


def _num_precincts(width: int, height: int, coding: bytes) -> int:
    """Return the number of precincts of a component, of all its resolutions, which halve from the last to the first."""
    sizes = coding[10:]
    return sum(
        -(-width >> len(sizes) - 1 - number >> (size & 15)) * -(-height >> len(sizes) - 1 - number >> (size >> 4))
        for number, size in enumerate(sizes)
    )


def sample_depth(content: bytes) -> int:
    """Return the bits of a sample of a JPEG 2000 file, the most of its channels; 0 if its header does not say it."""
    size = next((segment for marker, segment in codestream_segments(content) if marker == _SIZE), b"")
    return max(((depth & 127) + 1 for depth in size[36::3]), default=0)


def header_problem(content: bytes) -> str | None:
    """Return the reason why the header of a file would take too long to read, or None."""
    if content.startswith((CODESTREAM, JP2)):
        return _codestream_problem(content)
    if content.startswith(JPEG):
        for number, (marker, _start, _end) in enumerate(jpeg_segments(content)):
            if marker == SCAN:
                break
            if number >= MAX_SEGMENTS:
                return f"a JPEG with more than {MAX_SEGMENTS} segments before its first scan"
    elif content.startswith(PNG):
        compressed = 0
        for number, (kind, _start, _end) in enumerate(png_chunks(content)):
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
    if not content.startswith(JPEG) or next(islice(_SCAN_BYTES.finditer(content), allowed, None), None) is None:
        return None
    scans = 0
    for marker, _start, _end in jpeg_segments(content):
        scans += marker == SCAN
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


def layout_problem(image: Image.Image, num_bytes: int) -> str | None:
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


def without_metadata(content: bytes) -> bytes:
    """Return a JPEG or PNG without the metadata that may prevent its decoding: texts, profiles, resolutions, previews.

    EXIF data stays, where its checksum is right. Of an animated PNG the image that other decoders see stays.
    """
    if content.startswith(JPEG):
        kept = [content[:2]]
        for marker, start, end in jpeg_segments(content):
            if marker == SCAN:
                return b"".join([*kept, content[start:]])
            if (
                marker not in _METADATA
                or (marker in _COLOURS and end - start >= _LEAST_COLOURS)
                or (marker == _EXIF and content.startswith(b"Exif\0", start + 4))
            ):
                kept.append(content[start:end])
    elif content.startswith(PNG):
        kept = [PNG]
        for kind, start, end in png_chunks(content):
            checksum = zlib.crc32(content[start + 4 : end - 4]) if kind in {b"eXIf", b"sBIT"} else -1
            if kind[:1].isupper() or kind == b"tRNS" or checksum == int.from_bytes(content[end - 4 : end], "big"):
                kept.append(content[start:end])
        return b"".join(kept)
    return content
