"""Settings of work that may run on a work pool, the command of its workers, and runs per worker."""

import math

from tasks.config.distributed import DistributedConfig
from tasks.config.submitted import SingleConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput

PoolSettings = DistributedConfig | SingleConfig | TuneConfig
"""Settings of work that may run on a work pool."""


def worker_command(pool: str) -> str:
    """Return the command that starts a worker."""
    return f"prefect worker start --pool {pool}"


def check_slots(pool: str, limit: int | None, own_pool: str | None, group: str, what: str) -> str | None:
    """Check that a pool has a slot for runs that are submitted by a run on the same pool.

    Args:
        pool: Name of the pool that the runs are submitted to.
        limit: Its concurrency limit; None for no limit.
        own_pool: Name of the pool that the submitting run is on; None if no worker runs it.
        group: Group of settings that names the pool, for messages.
        what: Name of the submitted work, for messages.

    Returns:
        A warning if several such runs could wait for each other, else None.

    Raises:
        WrongInput: The submitting run has the only slot.
    """
    if own_pool != pool or limit is None:
        return None
    if limit <= 1:
        raise WrongInput(
            f"{group}.work_pool is '{pool}', on which this run has the only slot (its concurrency limit is {limit}), "
            f"so that {what} would never begin",
            setting=f"{group}.work_pool",
            way_out=f"raise the limit of the pool, give another pool, or set {group}.where to in_place",
        )
    return (
        f"this run and {what} share the work pool '{pool}' with {limit} slots: {limit} such runs at once would wait "
        "for each other without end; give them a pool of their own, or limit the deployment of this run"
    )


def runs_per_worker(wanted: int, limit: int | None, num_workers: int) -> int:
    """Return how many concurrent runs each worker of a pool has if they are spread evenly, at least 1.

    Args:
        wanted: Number of runs that are submitted at once.
        limit: Concurrency limit of the pool; None for no limit.
        num_workers: Number of workers that poll the pool.
    """
    num_concurrent = wanted if limit is None else min(wanted, limit)
    return max(1, math.ceil(num_concurrent / max(1, num_workers)))
