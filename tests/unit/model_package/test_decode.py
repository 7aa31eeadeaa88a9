"""Decoding of images in all pixel modes and orientations."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tasks.model_package.decode import decode_image, decode_pixels
from tests.builders.image_bytes import encoded, noise

WHITE = (255, 255, 255)
ORIENTATION_TAG = 0x0112


def with_orientation(orientation: int) -> Image.Exif:
    """Return EXIF data with the given orientation and nothing else."""
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    return exif


def test_grayscale_becomes_three_equal_channels() -> None:
    """A gray level becomes the same value in red, green and blue."""
    levels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4

    pixels = np.asarray(decode_image(encoded(Image.fromarray(levels))))

    assert np.array_equal(pixels, np.repeat(levels[:, :, None], 3, axis=2))


def test_rgb_is_unchanged() -> None:
    """A lossless RGB image is decoded pixel for pixel."""
    image = noise(7, 5)

    assert np.array_equal(np.asarray(decode_image(encoded(image))), np.asarray(image))


def test_transparent_gray_lies_on_white() -> None:
    """In mode LA, full transparency becomes white, half transparent black mid gray, and opaque pixels stay."""
    image = Image.new("LA", (3, 1))
    image.putdata([(0, 0), (0, 128), (0, 255)])

    decoded = decode_image(encoded(image))

    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (127, 127, 127)
    assert decoded.getpixel((2, 0)) == (0, 0, 0)


def test_transparent_rgba_lies_on_white() -> None:
    """In mode RGBA, the colour of a fully transparent pixel is not visible."""
    image = Image.new("RGBA", (2, 1))
    image.putdata([(255, 0, 0, 0), (255, 0, 0, 255)])

    decoded = decode_image(encoded(image))

    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (255, 0, 0)


def test_transparent_palette_index_lies_on_white() -> None:
    """In mode P, a transparent index becomes white, and the others keep their palette colour."""
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])

    decoded = decode_image(encoded(image, transparency=0))

    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (40, 50, 60)


def test_opaque_palette_keeps_its_colours() -> None:
    """In mode P without transparency, every index becomes its palette colour."""
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])

    decoded = decode_image(encoded(image))

    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30), (40, 50, 60)]


def test_transparent_colour_of_rgb_lies_on_white() -> None:
    """In mode RGB, a colour that is declared transparent becomes white."""
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))

    decoded = decode_image(encoded(image, transparency=(1, 2, 3)))

    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [WHITE, (9, 9, 9)]


def test_cmyk_jpeg_becomes_rgb() -> None:
    """A CMYK image of pure magenta becomes magenta in RGB."""
    decoded = decode_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 0, 0)), "JPEG", quality=95))

    assert decoded.mode == "RGB"
    assert np.allclose(decoded.getpixel((8, 8)), (255, 0, 255), atol=4)


def test_sixteen_bit_gray_keeps_its_upper_eight_bits() -> None:
    """In mode I;16, a ramp stays a ramp, whereas PIL's own conversion would clip nearly all of it to white."""
    samples = (np.arange(256, dtype=np.uint16) << 8).reshape(16, 16)

    pixels = np.asarray(decode_image(encoded(Image.fromarray(samples))))

    assert np.array_equal(pixels[:, :, 0], np.arange(256).reshape(16, 16))
    assert np.array_equal(pixels[:, :, 0], pixels[:, :, 2])


def test_one_bit_image_is_black_and_white() -> None:
    """Mode 1 becomes 0 and 255."""
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)

    decoded = decode_image(encoded(image))

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
    """The image is upright for every value of the EXIF orientation."""
    stored = noise(6, 4)
    upright = stored if turn is None else stored.transpose(turn)

    decoded = decode_image(encoded(stored, exif=with_orientation(orientation)))

    assert decoded.size == upright.size
    assert np.array_equal(np.asarray(decoded), np.asarray(upright))


def test_exif_orientation_of_a_jpeg_swaps_width_and_height() -> None:
    """Orientation 6, common on phones, is applied to a JPEG that is decoded at a reduced scale, too."""
    rotated = Image.new("RGB", (400, 200), "red")
    rotated.paste("blue", (0, 0, 200, 200))  # The left half is the top once the image is upright.
    content = encoded(rotated, "JPEG", exif=with_orientation(6))

    pixels = decode_pixels(content, 40)

    assert decode_image(content).size == (200, 400)
    assert np.allclose(pixels[5, 20], (0, 0, 255), atol=8)
    assert np.allclose(pixels[34, 20], (255, 0, 0), atol=8)


def test_first_frame_of_an_animation_is_decoded() -> None:
    """An animated PNG is decoded to its first frame."""
    first, second = Image.new("RGB", (4, 4), "green"), Image.new("RGB", (4, 4), "red")

    decoded = decode_image(encoded(first, save_all=True, append_images=[second]))

    assert decoded.getpixel((0, 0)) == (0, 128, 0)


def test_orientation_is_applied_despite_invalid_exif_tags() -> None:
    """A tag of a wrong type, as cameras write them, neither raises nor prevents the transposition."""
    exif = struct.pack("<2sHIH", b"II", 42, 8, 2)
    exif += struct.pack("<HHII", 0x0112, 3, 1, 6)  # Orientation, SHORT: 6
    exif += struct.pack("<HHI4s", 0x0128, 2, 4, b"abc\0")  # ResolutionUnit, a SHORT, given as text
    exif += struct.pack("<I", 0)
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4)).save(buffer, format="JPEG", exif=b"Exif\0\0" + exif)

    assert decode_image(buffer.getvalue()).size == (4, 6)


def test_sixteen_bit_gray_with_a_transparent_level_keeps_its_upper_eight_bits() -> None:
    """16-bit samples with a tRNS chunk do not pass through PIL's clipping conversion."""
    samples = (np.arange(256, dtype=np.uint16) << 8).reshape(16, 16)
    buffer = io.BytesIO()
    Image.fromarray(samples).save(buffer, format="PNG")
    content, data = buffer.getvalue(), struct.pack(">H", 0x0100)
    place = content.index(b"IDAT") - 4
    chunk = struct.pack(">I", 2) + b"tRNS" + data + struct.pack(">I", zlib.crc32(b"tRNS" + data))

    pixels = np.asarray(decode_image(content[:place] + chunk + content[place:]))

    assert pixels[8, 8].tolist() == [136, 136, 136]
