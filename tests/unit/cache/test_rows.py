"""Single images and label counts of a cache."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tasks.cache.labels import count_labels
from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.cache.rows import read_images
from tasks.refs import CacheRef

ROWS = 23
"""In groups of 3, two groups a file: the last group has one row of padding."""

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.mark.parametrize("kind", ["uint8", "jpeg"])
def test_images_are_those_of_their_rows_in_the_order_asked_for(make_cache: Callable[..., CacheRef], kind: str) -> None:
    """The first, the last, one twice: the pixels that training sees."""
    cache = make_cache({"train": ROWS}, format=kind)
    manifest = open_cache(cache)
    seen = torch.cat([batch.inputs for batch in CacheLoader(cache.url, manifest, "train", 4).epoch(0)])

    found = read_images(cache.url, manifest, "train", [22, 0, 7, 0])

    assert found.shape == (4, 16, 16, 3)
    assert torch.equal(found, seen[[22, 0, 7, 0]])


def test_no_rows_are_no_images(make_cache: Callable[..., CacheRef]) -> None:
    """The shape says so."""
    cache = make_cache({"train": ROWS})

    assert read_images(cache.url, open_cache(cache), "train", []).shape == (0, 16, 16, 3)


def test_labels_are_counted_without_the_padding(make_cache: Callable[..., CacheRef]) -> None:
    """Row i has label i mod 3: of 23 rows the third class has one less than the others, of 2 rows it has none."""
    cache = make_cache({"train": ROWS, "val": 2})

    assert (
        count_labels(cache.url, open_cache(cache), "train").tolist()
        == np.bincount(np.arange(ROWS) % 3).tolist()
        == [8, 8, 7]
    )
    assert count_labels(cache.url, open_cache(cache), "val").tolist() == [1, 1, 0]
