"""Idle Spark sessions beside a training run."""

from types import SimpleNamespace

import pytest

from tasks.config.storage import SparkConfig
from tasks.spark import session as spark


@pytest.mark.parametrize(
    ("free_gib", "master", "stays"),
    [(11, "local[*]", False), (12, "local[*]", True), (12, "spark://host:7077", False)],
)
def test_idle_session_stays_if_four_of_its_heaps_are_free(
    free_gib: int, master: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session stays only on a local master with free memory of four heaps, of which its own may be one."""
    session, stopped = SimpleNamespace(sparkContext=SimpleNamespace(master=master)), []
    monkeypatch.setattr(spark, "_state", spark._SessionState(session=session))  # Other tests may hold a session.
    monkeypatch.setattr(spark, "_stop", stopped.append)
    monkeypatch.setattr(spark, "free_memory", lambda: free_gib << 30)

    spark.release_memory_for_training(SparkConfig(driver_memory="3g", master=master))

    assert (spark._state.session is session, stopped) == ((True, []) if stays else (False, [session]))


def test_run_without_a_session_has_nothing_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose tables and cache existed has no session, and nothing is stopped."""
    monkeypatch.setattr(spark, "_state", spark._SessionState())
    monkeypatch.setattr(spark, "free_memory", lambda: 0)

    spark.release_memory_for_training(SparkConfig())

    assert spark._state.session is None
