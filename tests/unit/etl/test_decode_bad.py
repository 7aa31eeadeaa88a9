"""Files that are no images we take: each has a reason, and none ends the work."""

import io
import random
import zlib

import numpy as np
import pytest
from PIL import Image

from tasks.decode import (
    MAX_PIXELS,
    BadImage,
    Reason,
    decode_image,
    decode_pixels,
)
from tasks.image_structure import scan_problem
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
    """A file that ends early is refused, never shown half gray."""
    content = encoded(noise(64, 64), file_format)

    assert reason_of(content[: int(len(content) * share)]) is Reason.TRUNCATED


def test_png_with_a_wrong_checksum_is_refused() -> None:
    """A flipped bit in the compressed pixels does not go unnoticed."""
    content = bytearray(encoded(noise(64, 64)))
    content[len(content) // 2] ^= 0xFF

    assert reason_of(bytes(content)) is Reason.TRUNCATED


def test_empty_file_is_refused() -> None:
    """Zero bytes have a reason of their own."""
    assert reason_of(b"") is Reason.ZERO_BYTES


@pytest.mark.parametrize("content", [b"not an image at all\n", b"\x00" * 100, b"<html></html>"])
def test_other_file_is_not_an_image(content: bytes) -> None:
    """Text, zeros and a web page are no image, whatever the file is called."""
    assert reason_of(content) is Reason.NOT_AN_IMAGE


def test_unsupported_mode_is_refused() -> None:
    """Floating point samples have no range, so there is no right way to show them."""
    with pytest.raises(BadImage):
        decode_image(encoded(Image.new("F", (4, 4), 0.5), "TIFF"))


@pytest.mark.parametrize("side", [20_000, 10_000, 200_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_is_refused_from_its_header(side: int) -> None:
    """The header alone decides: there are no pixels behind it, and none are missed."""
    assert reason_of(png_header_only(side, side)) is Reason.TOO_MANY_PIXELS


def test_image_of_exactly_the_bound_is_decoded() -> None:
    """max_pixels is an upper bound, not the first size refused."""
    content = encoded(noise(10, 10))

    assert decode_image(content, max_pixels=100).size == (10, 10)
    assert reason_of(content, max_pixels=99) is Reason.TOO_MANY_PIXELS


def test_reason_and_detail_are_in_the_message() -> None:
    """What a prediction's error says names the reason for machines and the detail for people."""
    with pytest.raises(BadImage, match=r"^too_many_pixels: 10x10 is more than 99 pixels$"):
        decode_image(encoded(noise(10, 10)), max_pixels=99)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_random_damage_gives_a_image_or_a_reason(file_format: str) -> None:
    """Whatever bytes are changed, nothing but BadImage comes out: one bad file must not end a Spark job."""
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


def test_postscript_is_no_image() -> None:
    """A .jpg that is PostScript is never handed to Ghostscript."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, format="EPS")

    with pytest.raises(BadImage, match="^not_an_image"):
        decode_image(buffer.getvalue())


def test_jpeg_with_too_many_scans_is_refused() -> None:
    """Each goes over all pixels; the bound is 100, where encoders write about ten."""
    image = Image.new("RGB", (64, 64), "teal")

    assert reason_of(scan_bomb(image, 91)) is Reason.TOO_MANY_PARTS
    assert reason_of(scan_bomb(image, 20_000)) is Reason.TOO_MANY_PARTS
    assert decode_image(scan_bomb(image, 90)).size == (64, 64)
    with pytest.raises(BadImage, match="^too_many_parts: a JPEG of 4096 pixels with more than 100 scans$"):
        decode_pixels(scan_bomb(image, 91), 32)


def test_scans_behind_a_reserved_marker_count() -> None:
    """They are decoded by libjpeg: such a marker has no length, whatever the bytes behind it look like."""
    bomb = hidden_scan_bomb(2)
    # It is a JPEG that decodes, and so a bomb.
    assert Image.open(io.BytesIO(bomb)).convert("RGB").size == (64, 64)
    assert bomb.count(b"\xff\xda") > 1_000

    assert reason_of(bomb) is Reason.TOO_MANY_PARTS
    with pytest.raises(BadImage, match="^too_many_parts: a JPEG of 4096 pixels with more than 100 scans$"):
        decode_image(bomb)


def test_large_jpeg_may_have_fewer_scans() -> None:
    """What it costs is pixels times scans; libjpeg's own ten are taken at any size that is decoded."""
    assert scan_problem(scan_bomb(Image.new("RGB", (64, 64)), 20), num_pixels=80_000_000) is not None
    assert scan_problem(scan_bomb(Image.new("RGB", (64, 64)), 0), num_pixels=2 * MAX_PIXELS) is None


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_ordinary_progressive_jpeg_is_decoded(mode: str) -> None:
    """With the scans that libjpeg writes by default."""
    content = encoded(noise(64, 48).convert(mode), "JPEG", progressive=True)

    assert content.count(b"\xff\xda") > 1
    assert decode_image(content).size == (64, 48)


def test_scans_of_thumbnails_do_not_count() -> None:
    """Those within a segment, and those of a second image after the end of the first."""
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
    """It would take seconds a megabyte to read, some of it growing with the square; what cameras write is taken."""
    assert decode_image(few).size == (16, 16)
    assert reason_of(many) is Reason.TOO_MANY_PARTS


@pytest.mark.parametrize(
    ("whole", "bomb", "said"),
    [
        (run_length_bmp(64, 64), run_length_bmp(2048, 2049), "a BMP with run lengths of 4196352 pixels and 9276 bytes"),
        (run_length_bmp(64, 64), run_length_bmp(64, 64) + bytes(9 << 20), "a BMP with run lengths of 4096 pixels"),
        (tiff_with_tile(16, 256), tiff_with_tile(16, 60_000), "a TIFF of 16x16 pixels with tiles of 60000x60000"),
        (tiff_with_strips(64, 16), tiff_with_strips(64, 17), "a file of 4096 pixels in 17 strips that cover 34816"),
    ],
    ids=["run-lengths", "empty-runs", "tile", "strips"],
)
def test_small_file_of_much_work_is_refused(whole: bytes, bomb: bytes, said: str) -> None:
    """Its pixels are few, but a kilobyte takes seconds or half a gigabyte to decode; ordinary ones are taken."""
    assert decode_image(whole).size in {(64, 64), (16, 16)}
    with pytest.raises(BadImage, match=f"^too_many_parts: {said}"):
        decode_image(bomb)


def test_ordinary_tiff_is_decoded() -> None:
    """With its colours beside each other, and as three planes in strips of their own."""
    assert decode_image(encoded(noise(64, 48), "TIFF")).size == (64, 48)
    assert decode_image(encoded(noise(64, 48), "TIFF", compression="tiff_lzw")).size == (64, 48)
    assert np.array_equal(np.asarray(decode_image(tiff_with_planes(64))), np.zeros((64, 64, 3), np.uint8))


def test_first_frame_of_a_long_animation_is_decoded() -> None:
    """The other frames are not read, however many there are."""
    frames = [noise(4, 4, seed) for seed in range(300)]
    content = encoded(frames[0], save_all=True, append_images=frames[1:])

    assert content.count(b"fdAT") == 299
    assert np.array_equal(np.asarray(decode_image(content)), np.asarray(frames[0]))
