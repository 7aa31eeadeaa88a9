"""Image files as bytes, valid and damaged, for tests of decoding."""

import io
import struct
import zlib

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from tasks.model_package.decode import decode_image
from tasks.model_package.reasons import BadImage, Reason


def encoded(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """Return the image as a file encoded by PIL, or by pillow-heif for the format HEIC."""
    buffer = io.BytesIO()
    if file_format == "HEIC":
        pillow_heif.from_pillow(image).save(buffer, **options)
        return buffer.getvalue()
    image.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def noise(width: int, height: int, seed: int = 1) -> Image.Image:
    """Return an RGB image in which every pixel differs from its neighbours."""
    samples = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(samples)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}
"""Colour type of a PNG file by its number of channels."""


def deep_png(samples_HWC: np.ndarray, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG file of samples of 16 bits, with additional chunks before its pixel data."""
    height, width, channels = samples_HWC.shape
    header = struct.pack(">IIBBBBB", width, height, 16, PNG_COLOURS[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples_HWC)
    given = ((b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in given)


def deep_tiff(samples_HWC: np.ndarray, **tags: int) -> bytes:
    """Return an uncompressed TIFF file of samples of 16 bits, with additional tags by their numbers: t341=4095."""
    height, width, channels = samples_HWC.shape
    pixels = samples_HWC.astype("<u2").tobytes()
    bits: int | tuple[int, int] = 16 if channels == 1 else (channels, len(pixels))
    photometric = {1: 1, 3: 2, 4: 5}[channels]
    given = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 0, 277: channels, 278: height}
    given |= {279: len(pixels), **{int(name[1:]): value for name, value in tags.items()}}
    return tiff_file(given, pixels + struct.pack(f"<{channels}L", *channels * [16]))


def packed_tiff(samples_HW: np.ndarray) -> bytes:
    """Return an uncompressed TIFF file of gray samples of 12 bits, two in three bytes."""
    pixels = bytes.fromhex("".join(f"{sample:03x}" for sample in samples_HW.ravel()))
    height, width = samples_HW.shape
    given = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 0, 278: height, 279: len(pixels)}
    return tiff_file(given, pixels)


def raw_photo(*tags: tuple[int, int], begin: bytes = b"") -> bytes:
    """Return the begin of a TIFF with these tags and values in its first directory."""
    place = 8 + len(begin)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", place) + begin + struct.pack("<H", len(tags)) + entries + bytes(200)


def jpeg2000_with_precincts(side: int, exponent: int) -> bytes:
    """Return a JPEG 2000 codestream of a gray image whose header declares precincts of 2 to this power a side."""
    content = encoded(Image.new("L", (side, side)), "JPEG2000", no_jp2=True)
    place = content.index(b"\xff\x52")
    length = int.from_bytes(content[place + 2 : place + 4], "big")
    segment = bytearray(content[place + 4 : place + 2 + length])
    segment[0] |= 1
    segment += bytes([exponent << 4 | exponent] * (segment[5] + 1))
    return content[: place + 2] + struct.pack(">H", len(segment) + 2) + bytes(segment) + content[place + 2 + length :]


def png_header_only(width: int, height: int) -> bytes:
    """Return a PNG file with a header and without pixel data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")


def scan_bomb(image: Image.Image, num_repeats: int) -> bytes:
    """Return a progressive JPEG file whose last scan is repeated, which changes no coefficient."""
    content = encoded(image, "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + num_repeats * last + b"\xff\xd9"


def hidden_scan_bomb(num_regions: int) -> bytes:
    """Return a progressive JPEG file whose repeated scans follow a reserved marker with an apparent length.

    libjpeg, looking for a restart marker, skips that marker alone and decodes the scans behind it.
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


def run_length_bmp(width: int, height: int) -> bytes:
    """Return a run-length encoded BMP file whose rows are empty except for the first pixels."""
    body = b"\x01\x05\x00\x00" * height + b"\x00\x01"
    size = 14 + 40 + 1024
    header = struct.pack("<LllHHLLllLL", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<LHHL", size + len(body), 0, 0, size) + header + bytes(1024) + body


def tiff_file(tags: dict[int, int | tuple[int, int]], body: bytes) -> bytes:
    """Return a TIFF file of one channel and one bit; a tag has a value, or a count and an offset in `body`."""
    given = {258: 1, 262: 1, 277: 1} | tags
    begin = 8 + 2 + 12 * len(given) + 4
    entries = b""
    for tag, value in sorted(given.items()):
        count, number = value if isinstance(value, tuple) else (1, value)
        # Offsets of strips and tiles, and of arrays of values, count from the start of the file.
        place = begin if count > 1 or tag in {273, 324} else 0
        entries += struct.pack("<HHLL", tag, 4, count, number + place)
    return b"II*\0" + struct.pack("<LH", 8, len(given)) + entries + bytes(4) + body


def tiff_with_tile(side: int, tile: int) -> bytes:
    """Return a white fax-encoded TIFF file whose only tile differs in size from the image."""
    body = b"\xff" * (tile // 8 + 1)
    return tiff_file({256: side, 257: side, 259: 4, 322: tile, 323: tile, 324: 0, 325: len(body)}, body)


def tiff_with_strips(side: int, num_strips: int) -> bytes:
    """Return an uncompressed TIFF file of many strips, each half the image and all at the same offset."""
    body = bytes(side * side // 8)
    begin = 8 + 2 + 12 * 9 + 4
    offsets = struct.pack("<L", begin) * num_strips
    strips = (num_strips, len(body))
    tags = {256: side, 257: side, 259: 1, 273: strips, 278: side // 2, 279: strips}
    return tiff_file(tags, body + offsets)


def tiff_with_planes(side: int) -> bytes:
    """Return an uncompressed TIFF file of three planes with one strip each."""
    plane, bits = side * side, struct.pack("<LLL", 8, 8, 8)
    begin = 8 + 2 + 12 * 10 + 4
    offsets = struct.pack("<LLL", *(begin + number * plane for number in range(3)))
    body = bytes(3 * plane) + bits + offsets + struct.pack("<LLL", plane, plane, plane)
    arrays = {258: (3, 3 * plane), 273: (3, 3 * plane + 12), 279: (3, 3 * plane + 24)}
    return tiff_file({256: side, 257: side, 259: 1, 262: 2, 277: 3, 278: side, 284: 2} | arrays, body)


def jpeg_with_segments(num_segments: int, body: bytes) -> bytes:
    """Return a JPEG file with many APP1 segments."""
    content = encoded(Image.new("RGB", (16, 16)), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    return content[:2] + num_segments * segment + content[2:]


def jpeg_segment(marker: int, data: bytes) -> bytes:
    """Return a segment of a JPEG file."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def lossless_jpeg(side: int) -> bytes:
    """Return a lossless JPEG file (ITU T.81, Annex H) of mid gray: every difference to the neighbour is 0, a bit."""
    frame = struct.pack(">BHHB3B", 8, side, side, 1, 1, 0x11, 0)
    table, scan = bytes([0, 1, *15 * [0], 0]), bytes([1, 1, 0, 1, 0, 0])
    segments = jpeg_segment(0xC3, frame) + jpeg_segment(0xC4, table) + jpeg_segment(0xDA, scan)
    return b"\xff\xd8" + segments + bytes(side * side // 8) + b"\xff\xd9"


def jpeg_with_frame(frame: int, precision: int = 8) -> bytes:
    """Return a JPEG file whose frame header has another marker and precision, in bits."""
    content = bytearray(encoded(noise(64, 48), "JPEG"))
    place = content.index(b"\xff\xc0")
    content[place + 1], content[place + 4] = frame, precision
    return bytes(content)


def png_with_chunks(num_chunks: int, kind: bytes, data: bytes) -> bytes:
    """Return a PNG file with many chunks of a type before its pixel data."""
    content = encoded(Image.new("RGB", (16, 16)))
    place = content.index(b"IDAT") - 4
    return content[:place] + num_chunks * png_chunk(kind, data) + content[place:]


def reason_of(content: bytes, max_pixels: int = 89_478_485) -> Reason:
    """Return the reason for which the bytes are refused."""
    with pytest.raises(BadImage) as refused:
        decode_image(content, max_pixels)
    return refused.value.reason
