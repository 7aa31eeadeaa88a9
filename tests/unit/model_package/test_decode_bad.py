"""Files that are not usable images: each is refused with a reason."""

import io
import random
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from tasks.model_package.decode import decode_image, decode_pixels
from tasks.model_package.reasons import BadImage, Reason
from tasks.model_package.structure import MAX_PIXELS, header_problem, sample_depth, scan_problem
from tests.builders.image_bytes import (
    encoded,
    hidden_scan_bomb,
    jpeg2000_with_precincts,
    jpeg_segment,
    jpeg_with_frame,
    jpeg_with_segments,
    lossless_jpeg,
    noise,
    png_chunk,
    png_header_only,
    png_with_chunks,
    reason_of,
    run_length_bmp,
    scan_bomb,
    tiff_with_planes,
    tiff_with_strips,
    tiff_with_tile,
)

FILES = {
    name: encoded(noise(64, 64), name)
    for name in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "JPEG2000", "HEIC")
} | {
    "TIFF of LZW": encoded(noise(64, 64), "TIFF", compression="tiff_lzw"),
    "progressive JPEG": encoded(noise(64, 64), "JPEG", progressive=True),
    "JPEG2000 without boxes": encoded(noise(64, 64), "JPEG2000", no_jp2=True),
}


@pytest.mark.parametrize("name", FILES)
def test_cut_file_is_truncated(name: str) -> None:
    """A file that ends early, also within its header, is refused as such, and never decoded with gray areas."""
    content = FILES[name]

    least = 12 if name in {"AVIF", "HEIC"} else 4  # Before that, their files have a number and a word of any format.
    for length in (least, 12, 20, 30, *(int(len(content) * share) for share in (0.1, 0.3, 0.6, 0.95))):
        assert reason_of(content[:length]) is Reason.TRUNCATED, length


@pytest.mark.parametrize("name", ["PNG", "GIF", "TIFF of LZW"])
def test_file_with_damaged_pixels_is_damaged(name: str) -> None:
    """Flipped bits in compressed pixels are detected, and not taken for a file that ends early."""
    content = bytearray(FILES[name])
    for place in range(len(content) // 2, len(content) // 2 + 40):
        content[place] ^= 0x5A

    assert reason_of(bytes(content)) is Reason.DAMAGED


@pytest.mark.parametrize("tag", [TiffImagePlugin.STRIPOFFSETS, TiffImagePlugin.STRIPBYTECOUNTS])
@pytest.mark.parametrize("type_of_tag", [2, 7], ids=["text", "undefined"])
def test_tiff_with_strips_of_another_type_is_damaged(tag: int, type_of_tag: int) -> None:
    """The places of the strips are texts or bytes there."""
    content = FILES["TIFF of LZW"]
    entries = [struct.pack("<HH", tag, number) for number in (3, 4)]
    (entry,) = [entry for entry in entries if entry in content]

    assert reason_of(content.replace(entry, struct.pack("<HH", tag, type_of_tag))) is Reason.DAMAGED


@pytest.mark.parametrize(
    ("content", "variant"),
    [
        (b"\xff\x0a\xfa\x1f" + bytes(99), "JPEG XL, which"),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), "JPEG XL, which"),
        (encoded(noise(16, 16), "ICO"), "ICO, which"),
        (encoded(noise(8, 8), "PPM"), "PNM, which"),
        (encoded(noise(8, 8), "EPS"), "PostScript, which"),
        (b"%PDF-1.7\n", "PDF, which"),
        (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG, which"),
        (jpeg_with_frame(0xC1, 12), r"JPEG of a kind that is not decoded \(cannot handle 12-bit layers"),
        (jpeg_with_frame(0xC5), "hierarchical JPEG, which"),
        (jpeg_with_frame(0xCB), "lossless JPEG with arithmetic coding, which"),
        (jpeg_with_frame(0xF7), "JPEG-LS, which"),
    ],
)
def test_sound_file_of_another_format_is_named(content: bytes, variant: str) -> None:
    """A format or variant that is not decoded is named; a PostScript file is never passed to Ghostscript."""
    with pytest.raises(BadImage, match=f"^unsupported_format: {variant}"):
        decode_image(content)


@pytest.mark.parametrize(
    "content",
    [
        jpeg2000_with_precincts(1024, 1),
        encoded(noise(128, 128), "JPEG2000", codeblock_size=(4, 4)),
        encoded(noise(128, 128), "JPEG2000", tile_size=(16, 16)),
        re.sub(rb"(?<=\xff\x52...)..", b"\xff\xff", encoded(noise(64, 64), "JPEG2000"), count=1, flags=re.DOTALL),
    ],
    ids=["precincts", "code blocks", "tiles", "layers"],
)
def test_jpeg2000_of_many_parts_is_never_decoded(content: bytes) -> None:
    """A file of eight kilobytes can take gigabytes: each part is allocated."""
    assert len(content) < 100_000
    assert reason_of(content) is Reason.TOO_MANY_PARTS


@pytest.mark.parametrize(
    "options",
    [
        {"precinct_size": (128, 128)},
        {"codeblock_size": (32, 32)},
        {"tile_size": (128, 128)},
        {"num_resolutions": 1},
        {"quality_layers": [40, 20, 10]},
        {"irreversible": True, "no_jp2": True},
    ],
)
def test_jpeg2000_as_encoders_write_it_is_decoded(options: dict[str, object]) -> None:
    """Precincts halve with the resolution, as their number stays."""
    assert decode_image(encoded(noise(300, 200), "JPEG2000", **options)).size == (300, 200)
    assert decode_image(jpeg2000_with_precincts(64, 15)).size == (64, 64)


def test_damaged_jpeg2000_is_looked_at_in_a_moment() -> None:
    """Boxes and tiles whose lengths lead nowhere end the search, which would take minutes for a large file."""
    assert header_problem(b"\0\0\0\x0cjP  " + b"\0\0\0\x02abcd" * 1_000_000) is None
    content = jpeg2000_with_precincts(64, 15)
    place = content.index(b"\xff\x90") + 6
    short_tile = content[:place] + struct.pack(">I", 4) + content[place + 4 :] + bytes(1_000_000)
    assert header_problem(short_tile) == "a JPEG 2000 with more than 100000 segments"


def test_codestream_is_found_in_a_box_of_any_length() -> None:
    """Its length may be 0, up to the end of the file, or have 64 bits."""
    content = encoded(noise(64, 64), "JPEG2000")
    place = content.index(b"jp2c") - 4
    to_the_end = content[:place] + bytes(4) + content[place + 4 :]
    of_64_bits = content[:place] + struct.pack(">I4sQ", 1, b"jp2c", len(content) - place + 8) + content[place + 8 :]
    assert [sample_depth(found) for found in (content, to_the_end, of_64_bits)] == [8, 8, 8]


def test_jpeg2000_has_limits_of_its_own() -> None:
    """Deep samples have no known range, and each pixel takes much memory."""
    deep = encoded(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)), "JPEG2000")
    assert reason_of(deep) is Reason.UNSUPPORTED_MODE
    large = bytearray(jpeg2000_with_precincts(64, 15))
    place = large.index(b"\xff\x51") + 6
    large[place : place + 8] = struct.pack(">II", 8000, 8000)
    assert MAX_PIXELS > 8000 * 8000
    assert reason_of(bytes(large)) is Reason.TOO_MANY_PIXELS


def png_with_bad_checksum(kind: bytes, data: bytes) -> bytes:
    """Return a sound PNG file except for the checksum of an additional chunk."""
    content = png_with_chunks(1, kind, data)
    chunk = png_chunk(kind, data)
    return content.replace(chunk, chunk[:-1] + bytes([chunk[-1] ^ 1]))


@pytest.mark.parametrize(
    "content",
    [
        *(png_with_chunks(1, b"zTXt", b"a\0\0" + zlib.compress(bytes(size << 20))) for size in (2, 20)),
        png_with_chunks(1, b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(2 << 20))),
        png_with_chunks(1, b"iCCP", b"a\0\0" + zlib.compress(bytes(2 << 20))),
        *(png_with_chunks(1, kind, b"a\0\7") for kind in (b"zTXt", b"iCCP", b"pHYs", b"gAMA", b"cHRM", b"acTL")),
        *(png_with_bad_checksum(kind, b"a\0hello") for kind in (b"tEXt", b"pHYs", b"eXIf")),
        *(
            (content := encoded(Image.new("RGB", (16, 16)), "JPEG"))[:2] + jpeg_segment(marker, data) + content[2:]
            for marker, data in (
                (0xE0, b"JFIF\0"),
                (0xEE, b"Adobe"),
                (0xED, b"Photoshop 3.0\x008BIM\x03\xed"),
                (0xE2, b"ICC_PROFILE\0"),
                (0xE2, b"MPF\0II*\0\x08\0\0\0\1\0"),
                (0xE1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff"),
            )
        ),
    ],
)
def test_damaged_metadata_alone_refuses_no_pixels(content: bytes) -> None:
    """Sound pixels are decoded whatever texts, profiles, resolutions and previews are beside them."""
    assert np.array_equal(np.asarray(decode_image(content)), np.zeros((16, 16, 3), np.uint8))


def test_orientation_survives_damaged_metadata() -> None:
    """An image whose text cannot be read is still upright by its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = 6
    jpeg = encoded(noise(6, 4), "JPEG", exif=exif)
    png = encoded(noise(6, 4), exif=exif)
    place = png.index(b"IDAT") - 4

    assert decode_image(jpeg[:2] + jpeg_segment(0xEE, b"Adobe") + jpeg[2:]).size == (4, 6)
    assert decode_image(png[:place] + png_chunk(b"pHYs", b"") + png[place:]).size == (4, 6)


def test_verdict_does_not_depend_on_the_scale() -> None:
    """Whatever the size to which an image is decoded, it is accepted or refused for the same reason."""

    def verdict(content: bytes, box: int | None) -> Reason | None:
        try:
            decode_image(content, box=box)
        except BadImage as bad:
            return bad.reason
        return None

    assert [verdict(lossless_jpeg(64), box) for box in (None, 40, 16, 8)] == 4 * [None]
    assert decode_pixels(lossless_jpeg(64), 16)[8, 8].tolist() == [128, 128, 128]
    draw, verdicts = random.Random(2), set()
    for name in ("JPEG", "progressive JPEG"):
        for _ in range(60):
            damaged = bytearray(FILES[name])
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            cut = bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
            found = {verdict(cut, box) for box in (None, 33, 16, 8)}
            assert len(found) == 1, found
            verdicts |= found
    assert {None, Reason.TRUNCATED, Reason.DAMAGED} <= verdicts


def test_empty_file_is_refused() -> None:
    """An empty file has a separate reason."""
    assert reason_of(b"") is Reason.ZERO_BYTES


@pytest.mark.parametrize("content", [b"not an image at all\n", b"\x00" * 100, b"<html></html>", b"<!>" * 300])
def test_other_file_is_not_an_image(content: bytes) -> None:
    """Text, zeros and a web page are refused as not an image, in time that is linear in their length."""
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
