"""Normalization of the cache's pixels for a network."""

import pytest
import torch

from tasks.model_package.network import normalize


def test_black_and_white_are_normalized_with_imagenet_statistics() -> None:
    """Levels 0 and 255 become (0 - mean) / std and (1 - mean) / std of each channel."""
    images_BHWC = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 1, 3)

    normalized = normalize(images_BHWC)

    assert normalized.shape == (2, 3, 1, 1)
    assert normalized[0].flatten().tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert normalized[1].flatten().tolist() == pytest.approx([0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225], rel=1e-5)


def test_input_images_are_not_modified() -> None:
    """Normalization works in place on a copy, not on the given pixels."""
    images_BHWC = torch.full((1, 2, 2, 3), 7, dtype=torch.uint8)

    normalize(images_BHWC)

    assert bool((images_BHWC == 7).all())


def test_memory_format_is_channels_last() -> None:
    """The result is in channels-last memory format, which is fast for convolutions and needs no copy."""
    assert normalize(torch.zeros(2, 4, 5, 3, dtype=torch.uint8)).is_contiguous(memory_format=torch.channels_last)
