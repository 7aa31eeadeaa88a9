"""Letterboxing: an image of any size as the pixels of a square."""

import numpy as np
import pytest
from PIL import Image

from tasks.model_package.decode import (
    decode_image,
    decode_pixels,
    encode_jpeg,
    fit_within,
    letterbox,
)
from tests.builders.image_bytes import encoded, noise


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
    """Images are scaled by a single factor, and no side becomes 0."""
    assert fit_within(Image.new("RGB", size), side).size == fitted


def test_wide_image_has_white_bars_above_and_below() -> None:
    """A 40x20 image in a square of 32 is 16 pixels high and centered."""
    pixels = letterbox(Image.new("RGB", (40, 20), "red"), 32)

    is_white = (pixels == 255).all(axis=(1, 2))
    assert pixels.shape == (32, 32, 3)
    assert np.flatnonzero(~is_white).tolist() == list(range(8, 24))
    assert (pixels[8:24] == (255, 0, 0)).all()


def test_tall_image_has_white_bars_left_and_right() -> None:
    """A 20x40 image in a square of 32 is 16 pixels wide and centered."""
    pixels = letterbox(Image.new("RGB", (20, 40), "red"), 32)

    assert np.flatnonzero(~(pixels == 255).all(axis=(0, 2))).tolist() == list(range(8, 24))


def test_small_image_is_scaled_up_without_bars() -> None:
    """An 8x8 digit fills the whole square."""
    pixels = letterbox(Image.new("RGB", (8, 8), "blue"), 32)

    assert (pixels == (0, 0, 255)).all()


def test_decoding_is_deterministic() -> None:
    """The same bytes give the same pixels, in training and in serving."""
    content = encoded(noise(300, 200), "JPEG")

    first, second = decode_pixels(content, 48), decode_pixels(content, 48)

    assert first.dtype == np.uint8
    assert first.shape == (48, 48, 3)
    assert np.array_equal(first, second)


def test_jpeg_read_at_a_reduced_scale_looks_the_same() -> None:
    """Decoding a large JPEG at a reduced scale changes a smooth image by at most 4 levels."""
    ramp = np.linspace(0, 255, 512, dtype=np.uint8)
    image = Image.fromarray(np.stack([np.tile(ramp, (256, 1))] * 3, axis=2))
    content = encoded(image, "JPEG", quality=95)

    reduced = decode_pixels(content, 64).astype(int)
    whole = letterbox(decode_image(content), 64).astype(int)

    assert np.abs(reduced - whole).max() <= 4


def test_encoded_jpeg_is_close_to_the_image() -> None:
    """Encoding for storage changes a plain image by at most 6 levels."""
    image = Image.new("RGB", (32, 32), (200, 30, 90))

    assert np.allclose(np.asarray(decode_image(encode_jpeg(image, 90, "4:4:4"))), np.asarray(image), atol=6)
