"""Files that are not usable images: each is refused with a reason."""

import io
import random
import zlib

import numpy as np
import pytest
from PIL import Image

from tasks.model_package.decode import (
    MAX_PIXELS,
    BadImage,
    Reason,
    decode_image,
    decode_pixels,
    scan_problem,
)
from tests.builders.image_bytes import (
    encoded,
    hidden_scan_bomb,
    jpeg_with_segments,
    noise,
    png_header_only,
    png_with_chunks,
    reason_of,
    run_length_bmp,
    scan_bomb,
    tiff_with_planes,
    tiff_with_strips,
    tiff_with_tile,
)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_cut_file_is_truncated(file_format: str, share: float) -> None:
    """A file that ends early is refused, and never decoded with gray areas."""
    content = encoded(noise(64, 64), file_format)

    assert reason_of(content[: int(len(content) * share)]) is Reason.TRUNCATED


def test_png_with_a_wrong_checksum_is_refused() -> None:
    """Flipped bits in the compressed pixels are detected."""
    content = bytearray(encoded(noise(64, 64)))
    content[len(content) // 2] ^= 0xFF

    assert reason_of(bytes(content)) is Reason.TRUNCATED


def test_empty_file_is_refused() -> None:
    """An empty file has a separate reason."""
    assert reason_of(b"") is Reason.ZERO_BYTES


@pytest.mark.parametrize("content", [b"not an image at all\n", b"\x00" * 100, b"<html></html>"])
def test_other_file_is_not_an_image(content: bytes) -> None:
    """Text, zeros and a web page are refused as not an image."""
    assert reason_of(content) is Reason.NOT_AN_IMAGE


def test_unsupported_mode_is_refused() -> None:
    """Floating point samples are refused, since their range is undefined."""
    with pytest.raises(BadImage):
        decode_image(encoded(Image.new("F", (4, 4), 0.5), "TIFF"))


@pytest.mark.parametrize("side", [20_000, 10_000, 200_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_is_refused_from_its_header(side: int) -> None:
    """An image with too many pixels is refused by its header, without a read of its pixels."""
    assert reason_of(png_header_only(side, side)) is Reason.TOO_MANY_PIXELS


def test_image_of_exactly_max_pixels_is_decoded() -> None:
    """max_pixels is an inclusive upper bound."""
    content = encoded(noise(10, 10))

    assert decode_image(content, max_pixels=100).size == (10, 10)
    assert reason_of(content, max_pixels=99) is Reason.TOO_MANY_PIXELS


def test_reason_and_detail_are_in_the_message() -> None:
    """The message of BadImage has the machine-readable reason and a readable detail."""
    with pytest.raises(BadImage, match=r"^too_many_pixels: 10x10 is more than 99 pixels$"):
        decode_image(encoded(noise(10, 10)), max_pixels=99)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_random_damage_gives_an_image_or_a_reason(file_format: str) -> None:
    """Random changes of bytes raise only BadImage, so that a bad file does not fail a Spark job."""
    source, draw = encoded(noise(24, 16), file_format), random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(source)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            assert decode_pixels(bytes(damaged), 16).shape == (16, 16, 3)
        except BadImage:
            refused += 1
    assert refused > 0


def test_postscript_is_not_an_image() -> None:
    """A PostScript file with the extension .jpg is never passed to Ghostscript."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, format="EPS")

    with pytest.raises(BadImage, match="^not_an_image"):
        decode_image(buffer.getvalue())


def test_jpeg_with_too_many_scans_is_refused() -> None:
    """A JPEG with more than 100 scans is refused, since each scan covers all pixels; encoders write about ten."""
    image = Image.new("RGB", (64, 64), "teal")

    assert reason_of(scan_bomb(image, 91)) is Reason.TOO_MANY_PARTS
    assert reason_of(scan_bomb(image, 20_000)) is Reason.TOO_MANY_PARTS
    assert decode_image(scan_bomb(image, 90)).size == (64, 64)
    with pytest.raises(BadImage, match="^too_many_parts: a JPEG of 4096 pixels with more than 100 scans$"):
        decode_pixels(scan_bomb(image, 91), 32)


def test_scans_behind_a_reserved_marker_count() -> None:
    """Scans behind a reserved marker count, since libjpeg decodes them: such a marker has no length field."""
    bomb = hidden_scan_bomb(2)
    # Pillow decodes it, so it would be a denial of service.
    assert Image.open(io.BytesIO(bomb)).convert("RGB").size == (64, 64)
    assert bomb.count(b"\xff\xda") > 1_000

    assert reason_of(bomb) is Reason.TOO_MANY_PARTS
    with pytest.raises(BadImage, match="^too_many_parts: a JPEG of 4096 pixels with more than 100 scans$"):
        decode_image(bomb)


def test_large_jpeg_may_have_fewer_scans() -> None:
    """The bound is on pixels times scans; libjpeg's default of ten scans is accepted at any size."""
    assert scan_problem(scan_bomb(Image.new("RGB", (64, 64)), 20), num_pixels=80_000_000) is not None
    assert scan_problem(scan_bomb(Image.new("RGB", (64, 64)), 0), num_pixels=2 * MAX_PIXELS) is None


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_ordinary_progressive_jpeg_is_decoded(mode: str) -> None:
    """A progressive JPEG with libjpeg's default scans is decoded."""
    content = encoded(noise(64, 48).convert(mode), "JPEG", progressive=True)

    assert content.count(b"\xff\xda") > 1
    assert decode_image(content).size == (64, 48)


def test_scans_of_thumbnails_do_not_count() -> None:
    """Scans within a segment, and scans of a second image after the end of the first, do not count."""
    within = jpeg_with_segments(1, b"MPF\0" + 150 * b"\xff\xda\x00\x02")
    behind = encoded(noise(16, 16), "JPEG") + 150 * b"\xff\xda\x00\x02"

    assert decode_image(within).size == (16, 16)
    assert decode_image(behind).size == (16, 16)


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (jpeg_with_segments(500, b"Exif\0\0a"), jpeg_with_segments(6_000, b"Exif\0\0a")),
        (png_with_chunks(1_000, b"abCd", b""), png_with_chunks(100_001, b"abCd", b"")),
        (
            png_with_chunks(20, b"zTXt", b"name\0\0" + zlib.compress(bytes(100_000))),
            png_with_chunks(50, b"zTXt", b"name\0\0" + zlib.compress(bytes(100_000))),
        ),
        (
            png_with_chunks(1, b"iCCP", b"name\0\0" + zlib.compress(bytes(100_000))),
            png_with_chunks(1_000, b"iCCP", b"name\0\0" + zlib.compress(bytes(100_000))),
        ),
    ],
    ids=["segments", "chunks", "texts", "profiles"],
)
def test_header_of_too_many_parts_is_refused(few: bytes, many: bytes) -> None:
    """A header with too many parts, which takes seconds per megabyte to parse, is refused; ordinary headers are not."""
    assert decode_image(few).size == (16, 16)
    assert reason_of(many) is Reason.TOO_MANY_PARTS


@pytest.mark.parametrize(
    ("whole", "bomb", "detail"),
    [
        (run_length_bmp(64, 64), run_length_bmp(2048, 2049), "a BMP with run lengths of 4196352 pixels and 9276 bytes"),
        (run_length_bmp(64, 64), run_length_bmp(64, 64) + bytes(9 << 20), "a BMP with run lengths of 4096 pixels"),
        (tiff_with_tile(16, 256), tiff_with_tile(16, 60_000), "a TIFF of 16x16 pixels with tiles of 60000x60000"),
        (tiff_with_strips(64, 16), tiff_with_strips(64, 17), "a file of 4096 pixels in 17 strips that cover 34816"),
    ],
    ids=["run-lengths", "empty-runs", "tile", "strips"],
)
def test_small_file_that_is_expensive_to_decode_is_refused(whole: bytes, bomb: bytes, detail: str) -> None:
    """A file that takes seconds or half a gigabyte per kilobyte to decode is refused; ordinary files are not."""
    assert decode_image(whole).size in {(64, 64), (16, 16)}
    with pytest.raises(BadImage, match=f"^too_many_parts: {detail}"):
        decode_image(bomb)


def test_ordinary_tiff_is_decoded() -> None:
    """TIFF images with interleaved samples, and with three planes in separate strips, are decoded."""
    assert decode_image(encoded(noise(64, 48), "TIFF")).size == (64, 48)
    assert decode_image(encoded(noise(64, 48), "TIFF", compression="tiff_lzw")).size == (64, 48)
    assert np.array_equal(np.asarray(decode_image(tiff_with_planes(64))), np.zeros((64, 64, 3), np.uint8))


def test_first_frame_of_a_long_animation_is_decoded() -> None:
    """Only the first frame of an animation with 300 frames is decoded."""
    frames = [noise(4, 4, seed) for seed in range(300)]
    content = encoded(frames[0], save_all=True, append_images=frames[1:])

    assert content.count(b"fdAT") == 299
    assert np.array_equal(np.asarray(decode_image(content)), np.asarray(frames[0]))
