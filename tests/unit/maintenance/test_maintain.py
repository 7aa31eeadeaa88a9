"""How far back a vacuum keeps files."""

from datetime import UTC, datetime, timedelta

from tasks.maintenance.maintain import retention_hours

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def test_without_models_the_wanted_retention_holds() -> None:
    """Nothing older is needed."""
    assert retention_hours(168, None, NOW) == 168


def test_a_young_model_changes_nothing() -> None:
    """Its version is within the retention anyway."""
    assert retention_hours(168, NOW - timedelta(hours=10), NOW) == 168


def test_an_old_model_stretches_the_retention_past_its_commit() -> None:
    """Rounded up, and an hour more."""
    assert retention_hours(168, NOW - timedelta(hours=400, minutes=1), NOW) == 402
