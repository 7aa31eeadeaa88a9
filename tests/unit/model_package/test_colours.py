"""Colours of files with an ICC profile, which become sRGB from decode version 3 on."""

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from tasks.etl.extract import store_image
from tasks.model_package.colours import MAX_PROFILE_BYTES, SAME_LEVELS
from tasks.model_package.decode import decode_image, decode_pixels
from tasks.model_package.description import Decoding
from tasks.model_package.structure import MAX_PIXELS
from tests.builders.colour_profiles import adobe_rgb, from_adobe_rgb, gray, printer
from tests.builders.image_bytes import encoded

BEFORE = Decoding(version=2)

RAMP = np.stack(np.meshgrid(*[np.linspace(0, 255, 6)] * 3), axis=-1).reshape(12, 18, 3).astype(np.uint8)
"""Colours of all kinds, shape (12, 18, 3)."""


def levels(content: bytes, decoding: Decoding = Decoding()) -> np.ndarray:
    """Return the decoded pixels as integers, shape (H, W, 3)."""
    return np.asarray(decode_image(content, decoding=decoding)).astype(int)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_colours_of_a_profile_become_srgb(file_format: str) -> None:
    """The levels are those of the formulas of both spaces; models of decode version 2 see them as before."""
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(file_format, {})
    content = encoded(Image.fromarray(RAMP), file_format, icc_profile=adobe_rgb(), **options)
    plain = encoded(Image.fromarray(RAMP), file_format, **options)

    expected = from_adobe_rgb(levels(plain))

    assert np.abs(levels(content) - expected).max() < 3
    assert np.abs(levels(content) - RAMP).max() > 40
    assert np.array_equal(levels(content, BEFORE), levels(plain))


def test_profile_of_srgb_changes_no_level() -> None:
    """Most photos have such a profile, and differ neither in pixels nor in time."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

    assert np.array_equal(levels(encoded(Image.fromarray(RAMP), "PNG", icc_profile=profile)), RAMP)


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_gray_levels_of_a_gamma_become_srgb(mode: str) -> None:
    """A gamma of 1.8 is brightened as the curve of sRGB says; an opaque alpha channel changes nothing."""
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert(mode)
    linear = (np.arange(256).reshape(16, 16) / 255) ** 1.8
    expected = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)

    found = levels(encoded(image, "PNG", icc_profile=gray(1.8)))

    assert np.abs(found - expected[:, :, None]).max() <= SAME_LEVELS + 1


def test_inks_of_a_printer_become_the_colours_of_its_profile() -> None:
    """Paper is white, and cyan is the blue of the profile, and not the brightest that a screen shows."""
    inks = Image.new("CMYK", (16, 8))
    inks.paste((255, 0, 0, 0), (8, 0, 16, 8))
    content = encoded(inks, "TIFF", icc_profile=printer())

    found = levels(content)

    assert found[0, 0].min() >= 253
    red, green, blue = found[0, 12]
    assert red < 60
    assert 110 < green < 170
    assert blue > 190
    assert levels(content, BEFORE)[0, 12].tolist() == [0, 255, 255]


@pytest.mark.parametrize(
    "profile",
    [b"no profile", adobe_rgb()[:200], gray(1.0), printer(), adobe_rgb() + bytes(MAX_PROFILE_BYTES)],
    ids=["text", "cut", "of gray", "of inks", "too large"],
)
def test_profile_that_cannot_be_used_changes_nothing(profile: bytes) -> None:
    """It is damaged, or belongs to another kind of image; the image stays usable."""
    assert np.array_equal(levels(encoded(Image.fromarray(RAMP), "TIFF", icc_profile=profile)), RAMP)


def test_cache_and_stored_image_have_the_same_colours() -> None:
    """A large image is stored as sRGB, without its profile: its pixels are not converted twice."""
    image = Image.fromarray(RAMP.repeat(20, axis=0).repeat(20, axis=1))
    content = encoded(image, "PNG", icc_profile=adobe_rgb())

    stored = store_image(content, 120, MAX_PIXELS).content

    assert "icc_profile" not in Image.open(io.BytesIO(stored)).info
    found, expected = (decode_pixels(given, 60).astype(int) for given in (stored, content))
    assert np.abs(found - expected).mean() < 4
