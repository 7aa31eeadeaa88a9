"""The confidence interval of a proportion."""

import pytest

from tasks.interval import wilson_interval


def test_wilson_interval_matches_published_values() -> None:
    """For 8 of 10 the interval is 0.490 to 0.943; for all or none, one end is 1 or 0."""
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0)
