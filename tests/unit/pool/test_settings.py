"""Tests of the number of concurrent runs per worker of a pool."""

import pytest

from tasks.pool.settings import runs_per_worker


@pytest.mark.parametrize(
    ("wanted", "limit", "num_workers", "expected"),
    [
        (4, None, 1, 4),
        (4, 1, 1, 1),  # the pool's limit is one run at a time
        (2, 8, 1, 2),
        (4, None, 4, 1),  # one machine per run
        (4, None, 3, 2),
        (3, None, 0, 3),  # the last heartbeat of the only worker is too old
        (4, 0, 1, 1),  # the limit was set to 0 after this run had started
    ],
)
def test_concurrent_runs_are_spread_over_the_workers(
    wanted: int, limit: int | None, num_workers: int, expected: int
) -> None:
    """The number is bounded by the wanted runs and by the pool's limit, and at least 1."""
    assert runs_per_worker(wanted, limit, num_workers) == expected
