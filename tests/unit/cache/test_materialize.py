"""Warnings about the images of a cache."""

import pytest

from tasks.cache.materialize import warn_of_scaling


@pytest.mark.parametrize(
    ("stored_side", "said"),
    [
        (
            512,
            ["cache.image_size is 518, and etl.stored_side of its table 512: larger images were scaled down and are"],
        ),
        (518, []),
        (None, []),
    ],
)
def test_cache_of_larger_images_than_stored_is_a_warning(
    caplog: pytest.LogCaptureFixture, stored_side: int | None, said: list[str]
) -> None:
    """Images that were scaled down when they were stored are scaled up again; an older table may not record it."""
    warn_of_scaling(518, stored_side)
    assert [record.getMessage().removesuffix(" scaled up again") for record in caplog.records] == said
