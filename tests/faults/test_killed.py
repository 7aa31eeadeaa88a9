"""Driver, Python worker and JVM are killed in ETL and in materialisation, each at a random moment of each of them."""

import pytest

from tests.builders.killed_runs import MOMENTS, VICTIMS, check_killed


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_after_a_killed_one_ends_like_an_undisturbed_one(undisturbed, tmp_path, draw, victim, moment) -> None:
    """With the same rows and pixels, no half cache, no file and no process left."""
    check_killed(undisturbed, tmp_path / "home", victim, moment, draw.uniform(0, 0.4))
