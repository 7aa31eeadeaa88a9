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


def reason_of(content: bytes, max_pixels: int = 89_478_485) -> Reason:
    """Return the reason for which the bytes are refused."""
    with pytest.raises(BadImage) as refused:
        decode_image(content, max_pixels)
    return refused.value.reason
