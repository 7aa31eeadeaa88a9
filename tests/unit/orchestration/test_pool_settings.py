"""Tests of the slots of a pool, and of the number of concurrent runs per worker."""

import pytest

from tasks.errors import WrongInput
from tasks.orchestration.pool_settings import check_slots, runs_per_worker


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


def test_run_that_holds_the_only_slot_of_its_pool_may_not_submit_to_it() -> None:
    """It would wait for itself without end; the message has the setting and three ways out."""
    with pytest.raises(WrongInput, match="'gpu', on which this run has the only slot") as raised:
        check_slots("gpu", 1, "gpu", "distributed", "distributed training")
    assert raised.value.setting == "distributed.work_pool"
    assert raised.value.way_out == (
        "raise the limit of the pool, give another pool, or set distributed.where to in_place"
    )


@pytest.mark.parametrize(
    ("limit", "own_pool", "warned"), [(2, "gpu", True), (None, "gpu", False), (1, "cpu", False), (1, None, False)]
)
def test_run_that_shares_its_pool_is_warned_about_only_where_runs_may_wait_for_each_other(
    limit: int | None, own_pool: str | None, warned: bool
) -> None:
    """Two parents in two slots wait for each other; a pool without a limit or another pool is safe."""
    warning = check_slots("gpu", limit, own_pool, "distributed", "distributed training")
    assert (warning is not None) == warned
    assert warning is None or "share the work pool 'gpu' with 2 slots: 2 such runs at once would wait" in warning
