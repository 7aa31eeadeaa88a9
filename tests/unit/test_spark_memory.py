"""Whether an idle Spark session stays beside a training run."""

import pytest

from tasks.config.storage import SparkConfig
from tasks.spark import session as spark


@pytest.mark.parametrize(
    ("free_gib", "master", "stays"),
    [(11, "local[*]", False), (12, "local[*]", True), (12, "spark://host:7077", False)],
)
def test_an_idle_session_stays_where_four_of_its_heaps_are_free(
    free_gib: int, master: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own heap is one of them at most; on a small machine the training has the memory, on a cluster other runs."""
    session, stopped = object(), []
    monkeypatch.setattr(spark._kept, "session", session)
    monkeypatch.setattr(spark, "_stop", stopped.append)
    monkeypatch.setattr(spark, "free_memory", lambda: free_gib << 30)

    spark.leave_memory_to_training(SparkConfig(driver_memory="3g", master=master))

    assert (spark._kept.session is session, stopped) == ((True, []) if stays else (False, [session]))


def test_without_a_session_there_is_nothing_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose tables and cache were there has started none."""
    monkeypatch.setattr(spark, "free_memory", lambda: 0)

    spark.leave_memory_to_training(SparkConfig())

    assert spark._kept.session is None
