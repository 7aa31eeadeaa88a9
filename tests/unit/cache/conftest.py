"""A cache with a train split."""

from collections.abc import Callable

import pytest

from tasks.refs import CacheRef

ROWS = 23
"""Number of rows; in groups of 3 there are 8 row groups, the last with one row of padding."""


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Return a cache of 23 rows in four files."""
    return make_cache({"train": ROWS})
