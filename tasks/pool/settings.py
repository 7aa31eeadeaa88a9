"""Settings of work that may run on a work pool, the command of its workers, and runs per worker."""

import math
from typing import Literal, Protocol


class PoolSettings(Protocol):
    """Settings of work that may run on a work pool."""

    @property
    def where(self) -> Literal["auto", "work_pool", "in_place"]:
        """Place to run: auto is work_pool if a Prefect server is configured, else in_place."""

    @property
    def work_pool(self) -> str:
        """Name of the work pool."""

    @property
    def deployment(self) -> str:
        """Deployment to submit, as flow/deployment."""

    @property
    def submit_timeout_seconds(self) -> int:
        """Maximum time that a run waits while no worker polls the pool."""

    @property
    def run_timeout_seconds(self) -> int:
        """Maximum duration of a run."""


def worker_command(pool: str) -> str:
    """Return the command that starts a worker."""
    return f"prefect worker start --pool {pool}"


def runs_per_worker(wanted: int, limit: int | None, num_workers: int) -> int:
    """Return how many concurrent runs each worker of a pool has if they are spread evenly, at least 1.

    Args:
        wanted: Number of runs that are submitted at once.
        limit: Concurrency limit of the pool; None for no limit.
        num_workers: Number of workers that poll the pool.
    """
    num_concurrent = wanted if limit is None else min(wanted, limit)
    return max(1, math.ceil(num_concurrent / max(1, num_workers)))
