"""The interval of a share."""

import pytest

from tasks.interval import wilson_interval


def test_wilson_interval_is_the_known_one() -> None:
    """8 of 10: 0.490 to 0.943; all or none of them: one end is 1 or 0."""
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0)
