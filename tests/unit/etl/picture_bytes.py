"""Pictures as bytes of files, whole and damaged, for the tests of decoding."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tasks.etl.decode import BadImage, Reason, decode_image


def encoded(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """Return the file that PIL writes for the image."""
    buffer = io.BytesIO()
    image.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def noise(width: int, height: int, seed: int = 1) -> Image.Image:
    """Return an RGB picture in which every pixel differs from its neighbours."""
    samples = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(samples)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Return one chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header_only(width: int, height: int) -> bytes:
    """Return a PNG file whose header promises pixels that never come."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")


def scan_bomb(image: Image.Image, num_repeats: int) -> bytes:
    """Return a progressive JPEG file whose last scan is there so many times more, which changes no coefficient."""
    content = encoded(image, "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + num_repeats * last + b"\xff\xd9"


def hidden_scan_bomb(num_regions: int) -> bytes:
    """Return a progressive JPEG file whose repeated scans lie behind a reserved marker with what looks like a length.

    libjpeg skips that marker alone, where it looks for a restart marker, and decodes the scans behind it.
    """
    image = Image.new("RGB", (64, 64), "teal")
    content = encoded(image, "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    restarted = encoded(image, "JPEG", progressive=True, restart_marker_blocks=60)
    restarted = restarted[restarted.rindex(b"\xff\xda") : -2]
    restart = restarted.rindex(b"\xff\xd0")

    def interval(blocks: int) -> bytes:
        return b"\xff\xdd\x00\x04" + struct.pack(">H", blocks)

    room = 0xFEFE - 2 - (len(restarted) - restart)
    hidden = interval(0) + last * ((room - 6) // len(last))
    region = interval(60) + restarted[:restart] + b"\xff\x02\xfe\xfe" + restarted[restart:]
    return content[:-2] + (region + hidden.ljust(room, b"\xff")) * num_regions + b"\xff\xd9"


def jpeg_with_segments(num_segments: int, body: bytes) -> bytes:
    """Return a JPEG file with so many segments of kind APP1."""
    content = encoded(Image.new("RGB", (16, 16)), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    return content[:2] + num_segments * segment + content[2:]


def png_with_chunks(num_chunks: int, kind: bytes, data: bytes) -> bytes:
    """Return a PNG file with so many chunks of a kind before its pixels."""
    content = encoded(Image.new("RGB", (16, 16)))
    place = content.index(b"IDAT") - 4
    return content[:place] + num_chunks * png_chunk(kind, data) + content[place:]


def reason_of(content: bytes, max_pixels: int = 89_478_485) -> Reason:
    """Return the reason for which the bytes are refused."""
    with pytest.raises(BadImage) as refused:
        decode_image(content, max_pixels)
    return refused.value.reason
