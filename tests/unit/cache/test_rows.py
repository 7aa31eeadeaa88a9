"""Single images and label counts of a cache."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tasks.cache.loader import CacheLoader, read_images, read_labels, sample_classes
from tasks.cache.manifest import open_cache
from tasks.refs import CacheRef

ROWS = 23
"""Number of rows; in groups of 3, the last group has one row of padding."""


@pytest.mark.parametrize("kind", ["uint8", "jpeg"])
def test_images_are_those_of_the_given_rows_in_order(make_cache: Callable[..., CacheRef], kind: str) -> None:
    """The images of the first row (twice), the last and another one equal those of the loader."""
    cache = make_cache({"train": ROWS}, format=kind)
    manifest = open_cache(cache)
    loaded = torch.cat([batch.inputs for batch in CacheLoader(cache.url, manifest, "train", 4).epoch(0)])

    found = read_images(cache.url, manifest, "train", [22, 0, 7, 0])

    assert found.shape == (4, 16, 16, 3)
    assert torch.equal(found, loaded[[22, 0, 7, 0]])


def test_no_rows_give_an_empty_tensor(make_cache: Callable[..., CacheRef]) -> None:
    """An empty list of rows gives a tensor of shape (0, H, W, 3)."""
    cache = make_cache({"train": ROWS})

    assert read_images(cache.url, open_cache(cache), "train", []).shape == (0, 16, 16, 3)


def test_labels_are_read_in_the_order_of_the_rows_without_padding(make_cache: Callable[..., CacheRef]) -> None:
    """Row i has the label i mod 3."""
    cache = make_cache({"train": ROWS, "val": 2})

    assert read_labels(cache.url, open_cache(cache), "train").tolist() == (np.arange(ROWS) % 3).tolist()
    assert read_labels(cache.url, open_cache(cache), "val").tolist() == [0, 1]


def test_a_few_images_of_each_class_are_its_first_ones(make_cache: Callable[..., CacheRef]) -> None:
    """With label i mod 3 in row i, they are rows 0, 3 for the first class; a class without rows has none."""
    cache = make_cache({"train": ROWS, "val": 2})
    manifest = open_cache(cache)
    loaded = torch.cat([batch.inputs for batch in CacheLoader(cache.url, manifest, "train", 4).epoch(0)])

    found = sample_classes(cache.url, manifest, "train", 2)

    assert [len(images) for images in found] == [2, 2, 2]
    for label, images in enumerate(found):
        assert torch.equal(torch.stack(images), loaded[[label, label + 3]])
    assert [len(images) for images in sample_classes(cache.url, manifest, "val", 2)] == [1, 1, 0]
