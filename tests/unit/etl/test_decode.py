"""Every kind of picture and every kind of damage that a folder of images holds."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tasks.etl.decode import (
    BadImage,
    Reason,
    decode_image,
    decode_pixels,
    encode_jpeg,
    fit_within,
    letterbox,
)

WHITE = (255, 255, 255)
ORIENTATION_TAG = 0x0112


def encoded(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """Return the file that PIL writes for the image."""
    buffer = io.BytesIO()
    image.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def noise(width: int, height: int, seed: int = 1) -> Image.Image:
    """Return an RGB picture in which every pixel differs from its neighbours."""
    samples = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(samples)


def with_orientation(orientation: int) -> Image.Exif:
    """Return EXIF data with the given orientation and nothing else."""
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    return exif


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


def test_grayscale_becomes_three_equal_channels() -> None:
    """A gray level is the same in red, green and blue."""
    levels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4

    pixels = np.asarray(decode_image(encoded(Image.fromarray(levels))))

    assert np.array_equal(pixels, np.repeat(levels[:, :, None], 3, axis=2))


def test_rgb_is_left_as_it_is() -> None:
    """A lossless RGB picture comes back pixel for pixel."""
    picture = noise(7, 5)

    assert np.array_equal(np.asarray(decode_image(encoded(picture))), np.asarray(picture))


def test_transparent_gray_lies_on_white() -> None:
    """LA: what is fully transparent is white, half transparent black is mid gray, opaque stays."""
    picture = Image.new("LA", (3, 1))
    picture.putdata([(0, 0), (0, 128), (0, 255)])

    decoded = decode_image(encoded(picture))

    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (127, 127, 127)
    assert decoded.getpixel((2, 0)) == (0, 0, 0)


def test_transparent_rgba_lies_on_white() -> None:
    """RGBA: the colour hidden under full transparency does not shine through."""
    picture = Image.new("RGBA", (2, 1))
    picture.putdata([(255, 0, 0, 0), (255, 0, 0, 255)])

    decoded = decode_image(encoded(picture))

    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (255, 0, 0)


def test_transparent_palette_index_lies_on_white() -> None:
    """P with a transparent index: that index is white, the others keep their palette colour."""
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putdata([0, 1])

    decoded = decode_image(encoded(picture, transparency=0))

    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (40, 50, 60)


def test_opaque_palette_keeps_its_colours() -> None:
    """P without transparency: every index becomes its palette colour."""
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putdata([0, 1])

    decoded = decode_image(encoded(picture))

    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30), (40, 50, 60)]


def test_transparent_colour_of_rgb_lies_on_white() -> None:
    """RGB with one colour declared transparent: that colour is white."""
    picture = Image.new("RGB", (2, 1), (1, 2, 3))
    picture.putpixel((1, 0), (9, 9, 9))

    decoded = decode_image(encoded(picture, transparency=(1, 2, 3)))

    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [WHITE, (9, 9, 9)]


def test_cmyk_jpeg_becomes_rgb() -> None:
    """Pure magenta ink is magenta light."""
    decoded = decode_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 0, 0)), "JPEG", quality=95))

    assert decoded.mode == "RGB"
    assert np.allclose(decoded.getpixel((8, 8)), (255, 0, 255), atol=4)


def test_sixteen_bit_gray_keeps_its_upper_eight_bits() -> None:
    """I;16: a ramp stays a ramp, where PIL's own conversion would clip nearly all of it to white."""
    samples = (np.arange(256, dtype=np.uint16) << 8).reshape(16, 16)

    pixels = np.asarray(decode_image(encoded(Image.fromarray(samples))))

    assert np.array_equal(pixels[:, :, 0], np.arange(256).reshape(16, 16))
    assert np.array_equal(pixels[:, :, 0], pixels[:, :, 2])


def test_one_bit_picture_is_black_and_white() -> None:
    """Mode 1 becomes 0 and 255."""
    picture = Image.new("1", (2, 1))
    picture.putpixel((1, 0), 1)

    decoded = decode_image(encoded(picture))

    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), WHITE]


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (1, None),
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_270),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_90),
    ],
)
def test_exif_orientation_is_applied(orientation: int, turn: Image.Transpose | None) -> None:
    """A camera held on its side or upside down still gives an upright picture."""
    stored = noise(6, 4)
    upright = stored if turn is None else stored.transpose(turn)

    decoded = decode_image(encoded(stored, exif=with_orientation(orientation)))

    assert decoded.size == upright.size
    assert np.array_equal(np.asarray(decoded), np.asarray(upright))


def test_exif_orientation_of_a_jpeg_swaps_width_and_height() -> None:
    """Orientation 6, the usual one of phones, turns a JPEG that is read at a reduced scale as well."""
    lying = Image.new("RGB", (400, 200), "red")
    lying.paste("blue", (0, 0, 200, 200))  # The left half is the top once the picture stands upright.
    content = encoded(lying, "JPEG", exif=with_orientation(6))

    pixels = decode_pixels(content, 40)

    assert decode_image(content).size == (200, 400)
    assert np.allclose(pixels[5, 20], (0, 0, 255), atol=8)
    assert np.allclose(pixels[34, 20], (255, 0, 0), atol=8)


def test_first_frame_of_an_animation_is_taken() -> None:
    """An animated PNG is its first picture."""
    first, second = Image.new("RGB", (4, 4), "green"), Image.new("RGB", (4, 4), "red")

    decoded = decode_image(encoded(first, save_all=True, append_images=[second]))

    assert decoded.getpixel((0, 0)) == (0, 128, 0)


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


@pytest.mark.parametrize("content", [b"not a picture at all\n", b"\x00" * 100, b"<html></html>"])
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


def test_picture_of_exactly_the_bound_is_decoded() -> None:
    """max_pixels is an upper bound, not the first size refused."""
    content = encoded(noise(10, 10))

    assert decode_image(content, max_pixels=100).size == (10, 10)
    assert reason_of(content, max_pixels=99) is Reason.TOO_MANY_PIXELS


def test_reason_and_detail_are_in_the_message() -> None:
    """What a prediction's error says names the reason for machines and the detail for people."""
    with pytest.raises(BadImage, match=r"^too_many_pixels: 10x10 is more than 99 pixels$"):
        decode_image(encoded(noise(10, 10)), max_pixels=99)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_random_damage_gives_a_picture_or_a_reason(file_format: str) -> None:
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


@pytest.mark.parametrize(
    ("size", "side", "fitted"),
    [
        ((400, 200), 100, (100, 50)),
        ((200, 400), 100, (50, 100)),
        ((8, 8), 32, (32, 32)),
        ((10, 5), 30, (30, 15)),
        ((1000, 1), 50, (50, 1)),
        ((64, 64), 64, (64, 64)),
    ],
)
def test_longest_side_is_fitted_and_the_aspect_kept(size: tuple[int, int], side: int, fitted: tuple[int, int]) -> None:
    """Pictures are scaled down or up by one factor, and no side ever vanishes."""
    assert fit_within(Image.new("RGB", size), side).size == fitted


def test_wide_picture_has_white_bars_above_and_below() -> None:
    """A 40x20 picture in a square of 32 is 16 high and lies in the middle."""
    pixels = letterbox(Image.new("RGB", (40, 20), "red"), 32)

    is_white = (pixels == 255).all(axis=(1, 2))
    assert pixels.shape == (32, 32, 3)
    assert np.flatnonzero(~is_white).tolist() == list(range(8, 24))
    assert (pixels[8:24] == (255, 0, 0)).all()


def test_tall_picture_has_white_bars_left_and_right() -> None:
    """A 20x40 picture in a square of 32 is 16 wide and stands in the middle."""
    pixels = letterbox(Image.new("RGB", (20, 40), "red"), 32)

    assert np.flatnonzero(~(pixels == 255).all(axis=(0, 2))).tolist() == list(range(8, 24))


def test_small_picture_is_scaled_up_without_bars() -> None:
    """An 8x8 digit fills the whole square."""
    pixels = letterbox(Image.new("RGB", (8, 8), "blue"), 32)

    assert (pixels == (0, 0, 255)).all()


def test_pixels_are_the_same_every_time() -> None:
    """The same bytes give the same pixels: what training saw is what serving sees."""
    content = encoded(noise(300, 200), "JPEG")

    first, second = decode_pixels(content, 48), decode_pixels(content, 48)

    assert first.dtype == np.uint8
    assert first.shape == (48, 48, 3)
    assert np.array_equal(first, second)


def test_jpeg_read_at_a_reduced_scale_looks_the_same() -> None:
    """Decoding a large JPEG at a half or a quarter changes smooth pictures by little, and never its place."""
    ramp = np.linspace(0, 255, 512, dtype=np.uint8)
    picture = Image.fromarray(np.stack([np.tile(ramp, (256, 1))] * 3, axis=2))
    content = encoded(picture, "JPEG", quality=95)

    reduced = decode_pixels(content, 64).astype(int)
    whole = letterbox(decode_image(content), 64).astype(int)

    assert np.abs(reduced - whole).max() <= 4


def test_encoded_jpeg_is_close_to_the_picture() -> None:
    """Scaling down for storage costs a few levels, not the colours."""
    picture = Image.new("RGB", (32, 32), (200, 30, 90))

    assert np.allclose(np.asarray(decode_image(encode_jpeg(picture, 90, "4:4:4"))), np.asarray(picture), atol=6)


def test_odd_exif_does_not_get_in_the_way_of_turning() -> None:
    """A tag of another type than its own, as cameras write them, costs neither the job nor the picture."""
    exif = struct.pack("<2sHIH", b"II", 42, 8, 2)
    exif += struct.pack("<HHII", 0x0112, 3, 1, 6)  # Orientation, SHORT: 6
    exif += struct.pack("<HHI4s", 0x0128, 2, 4, b"abc\0")  # ResolutionUnit, a SHORT, given as text
    exif += struct.pack("<I", 0)
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4)).save(buffer, format="JPEG", exif=b"Exif\0\0" + exif)

    assert decode_image(buffer.getvalue()).size == (4, 6)


def test_sixteen_bit_gray_with_a_transparent_level_keeps_its_upper_eight_bits() -> None:
    """A tRNS chunk does not send 16-bit samples through PIL's clipping conversion."""
    samples = (np.arange(256, dtype=np.uint16) << 8).reshape(16, 16)
    buffer = io.BytesIO()
    Image.fromarray(samples).save(buffer, format="PNG")
    content, data = buffer.getvalue(), struct.pack(">H", 0x0100)
    place = content.index(b"IDAT") - 4
    chunk = struct.pack(">I", 2) + b"tRNS" + data + struct.pack(">I", zlib.crc32(b"tRNS" + data))

    pixels = np.asarray(decode_image(content[:place] + chunk + content[place:]))

    assert pixels[8, 8].tolist() == [136, 136, 136]


def test_postscript_is_no_picture() -> None:
    """A .jpg that is PostScript is never handed to Ghostscript."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, format="EPS")

    with pytest.raises(BadImage, match="^not_an_image"):
        decode_image(buffer.getvalue())
