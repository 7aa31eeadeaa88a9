"""Samples of more than 8 bits: scaled by the range that the file says or a setting gives, else refused."""

import struct

import numpy as np
import pytest
from PIL import Image

from tasks.model_package.decode import decode_image
from tasks.model_package.description import AS_BEFORE, Decoding
from tasks.model_package.reasons import BadImage
from tests.builders.image_bytes import deep_png, deep_tiff, encoded, packed_tiff

LEVELS = np.arange(256, dtype=np.uint16).reshape(16, 16)
TWELVE = LEVELS * 16 + 3
"""A ramp of samples of 12 bits."""

SCALED = LEVELS[:, :, None] * (65535 / 4095)
"""The lowest sixteenth of 12 bits, multiplied to 16 bits: nearly black."""

FULL = np.full_like(LEVELS, 0xFFFF)
COLOURS = np.stack([TWELVE, TWELVE[::-1], TWELVE.T], axis=2)
OPAQUE = np.concatenate([COLOURS, FULL[:, :, None]], axis=2)
INKS = np.concatenate([COLOURS, TWELVE[:, ::-1, None] // 4], axis=2)

GRAY = np.repeat(LEVELS[:, :, None], 3, axis=2)
RGB = COLOURS >> 4
BANDS = [Image.fromarray((INKS[:, :, band] >> 4).astype(np.uint8)) for band in range(4)]
INKED = np.asarray(Image.merge("CMYK", BANDS).convert("RGB"))

UNKNOWN = {
    "gray PNG": (deep_png(TWELVE[:, :, None]), GRAY),
    "gray PNG with alpha": (deep_png(np.stack([TWELVE, FULL], axis=2)), GRAY),
    "RGB PNG": (deep_png(COLOURS), RGB),
    "RGBA PNG": (deep_png(OPAQUE), RGB),
    "gray TIFF": (deep_tiff(TWELVE[:, :, None]), GRAY),
    "gray TIFF of LZW": (encoded(Image.fromarray(TWELVE), "TIFF", compression="tiff_lzw"), GRAY),
    "int32 TIFF": (encoded(Image.fromarray(TWELVE.astype(np.int32)), "TIFF"), GRAY),
    "RGB TIFF": (deep_tiff(COLOURS), RGB),
    "premultiplied TIFF": (deep_tiff(OPAQUE, t262=2, t338=1), RGB),
    "CMYK TIFF": (deep_tiff(INKS), INKED),
}
"""Files with samples of 12 bits that do not say so, and the pixels that they show."""

STATED = {
    "sBIT": (deep_png(TWELVE[:, :, None], (b"sBIT", b"\x0c")), GRAY),
    "sBIT of RGB": (deep_png(COLOURS, (b"sBIT", b"\x0c\x0c\x0c")), RGB),
    "sBIT of scaled samples": (deep_png(LEVELS[:, :, None] * 257, (b"sBIT", b"\x0c")), GRAY),
    "sBIT of a dark image": (deep_png(TWELVE[:, :, None], (b"sBIT", b"\x10")), GRAY >> 4),
    "12 bits per sample": (packed_tiff(TWELVE), GRAY),
    "MaxSampleValue": (deep_tiff(TWELVE[:, :, None], t281=4095), GRAY),
    "SMaxSampleValue": (deep_tiff(TWELVE[:, :, None], t341=4000), GRAY),
    "SMaxSampleValue of 8 bits": (deep_tiff(LEVELS[:, :, None], t341=255), GRAY),
    "SMaxSampleValue of int32": (encoded(Image.fromarray(LEVELS.astype(np.int32)), "TIFF", tiffinfo={341: 255}), GRAY),
    "white is zero": (deep_tiff(LEVELS[:, :, None] * 257, t262=0), 255 - GRAY),
    "16 bits": (deep_png(LEVELS[:, :, None] * 257), GRAY),
    "MaxSampleValue of 32 bits": (deep_tiff(LEVELS[:, :, None] * 257, t281=2**32 - 1), GRAY),
    "16 bits as int32": (encoded(Image.fromarray(LEVELS.astype(np.int32) * 257), "TIFF"), GRAY),
    "black": (deep_png(LEVELS[:, :, None] * 0), GRAY * 0),
}
"""Files whose range follows from what they say, and the pixels that they show."""


def pixels(content: bytes, decoding: Decoding) -> np.ndarray:
    """Return the pixels of a file, uint8 (H, W, 3)."""
    return np.asarray(decode_image(content, decoding=decoding))


@pytest.mark.parametrize(("content", "expected"), UNKNOWN.values(), ids=UNKNOWN)
def test_samples_of_an_unknown_range_are_refused_or_scaled_by_the_setting(content: bytes, expected: np.ndarray) -> None:
    """They are never shown with 16 levels; tables of earlier releases have them so, and keep them."""
    with pytest.raises(BadImage, match=r"^unknown_range: the samples are at most 4083, .*: give etl.sample_bits$"):
        pixels(content, Decoding())
    assert np.array_equal(pixels(content, Decoding(sample_bits=12)), expected)
    before = pixels(content, AS_BEFORE)
    assert int(before.max()) - int(before.min()) <= 15 + (3 if expected is INKED else 0)


@pytest.mark.parametrize(("content", "expected"), STATED.values(), ids=STATED)
def test_samples_are_scaled_by_the_range_of_their_file(content: bytes, expected: np.ndarray) -> None:
    """A PNG says its bits in sBIT, a TIFF in its bits per sample and the largest value of a sample."""
    assert np.array_equal(pixels(content, Decoding()), expected)


def test_samples_of_16_bits_are_not_scaled_by_more() -> None:
    """A setting for files of 32 bits leaves others as they are; they were black."""
    content = deep_png(LEVELS[:, :, None] * 257)
    assert np.array_equal(pixels(content, Decoding(sample_bits=24)), GRAY)


@pytest.mark.parametrize(
    ("content", "bits", "sentence"),
    [
        (deep_png(LEVELS[:, :, None] * 257), 12, "the samples from 0 to 65535 are outside of 12 bits"),
        (deep_tiff(TWELVE[:, :, None], t341=255), None, "the samples from 3 to 4083 are outside of 8 bits"),
        (
            encoded(Image.fromarray(LEVELS.astype(np.int32) - 9), "TIFF"),
            16,
            "the samples from -9 to 246 are outside of 16 bits",
        ),
        (deep_png(TWELVE[:, :, None] & 0xFF0, (b"sBIT", b"\x0c")), None, "the samples are at most 4080"),
        (deep_png(SCALED.round(), (b"sBIT", b"\x0c")), None, "the samples are at most 4081"),
        (deep_png(np.floor(SCALED), (b"sBIT", b"\x0c")), None, "the samples are at most 4080"),
    ],
)
def test_samples_outside_of_their_range_are_refused(content: bytes, bits: int | None, sentence: str) -> None:
    """Neither a setting nor a file that is wrong about the range gives clipped pixels."""
    with pytest.raises(BadImage, match=f"^unknown_range: {sentence}"):
        pixels(content, Decoding(sample_bits=bits))


def test_channels_in_separate_planes_are_refused() -> None:
    """PIL decodes planes of 16 bits as planes of 8, which is noise."""
    with pytest.raises(BadImage, match="^unsupported_mode: channels of 16 bits in separate planes"):
        pixels(deep_tiff(COLOURS, t284=2), Decoding())


@pytest.mark.parametrize("order", ["gray", "RGB"])
def test_transparent_colour_of_sixteen_bits_lies_on_white(order: str) -> None:
    """Exactly the samples of the declared colour become white; those that share its upper byte do not."""
    samples = np.stack((1 if order == "gray" else 3) * [LEVELS * 257], axis=2)
    samples[0, 1] = 0x8834
    samples[0, 2] = 0x8812
    content = deep_png(samples, (b"tRNS", struct.pack(">H", 0x8834) * samples.shape[2]))

    found = pixels(content, Decoding())

    assert [found[0, x].tolist() for x in (1, 2)] == [[255, 255, 255], [0x88, 0x88, 0x88]]
    assert np.array_equal(found[1:], GRAY[1:])
    assert pixels(content, AS_BEFORE)[0, 1].tolist() != [255, 255, 255]


def test_orientation_of_deep_samples_is_applied() -> None:
    """Samples that are read twice, once for each byte, are upright as well."""
    exif = Image.Exif()
    exif[0x0112] = 6
    content = deep_png(COLOURS[:4], (b"sBIT", b"\x0c\x0c\x0c"), (b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")))

    assert np.array_equal(pixels(content, Decoding()), np.rot90(RGB[:4], -1))
