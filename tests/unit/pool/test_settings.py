"""What the settings of a pool say of its runs."""

import pytest

from tasks.pool.settings import runs_per_worker


@pytest.mark.parametrize(
    ("wanted", "limit", "num_workers", "expected"),
    [
        (4, None, 1, 4),
        (4, 1, 1, 1),  # the pool lets one run at a time: it has the machine to itself
        (2, 8, 1, 2),
        (4, None, 4, 1),  # a machine each
        (4, None, 3, 2),
        (3, None, 0, 3),  # a worker whose last sign of life was too long ago
        (4, 0, 1, 1),  # closed after this one began
    ],
)
def test_runs_at_once_are_shared_among_the_workers(
    wanted: int, limit: int | None, num_workers: int, expected: int
) -> None:
    """As many as are wanted, as many as the pool lets run, and this one in any case."""
    assert runs_per_worker(wanted, limit, num_workers) == expected
