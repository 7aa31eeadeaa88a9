"""What a person sets of work that may run on a work pool, how its worker is started, and how many runs that has."""

import math
from typing import Literal, Protocol


class PoolSettings(Protocol):
    """What a person sets of work that may run on a pool."""

    @property
    def where(self) -> Literal["auto", "work_pool", "in_place"]:
        """Whether to submit; auto does where a Prefect server is configured."""

    @property
    def work_pool(self) -> str:
        """Name of the pool."""

    @property
    def deployment(self) -> str:
        """Deployment to submit, flow/deployment."""

    @property
    def submit_timeout_seconds(self) -> int:
        """How long the run may wait while no worker polls the pool."""

    @property
    def run_timeout_seconds(self) -> int:
        """How long the run may take."""


def worker_command(pool: str) -> str:
    """Return the command that starts a worker."""
    return f"prefect worker start --pool {pool}"


def runs_per_worker(wanted: int, limit: int | None, num_workers: int) -> int:
    """Return how many of `wanted` runs at once each worker of a pool has, where all have as many.

    Args:
        wanted: Runs that whoever submits them wants at once.
        limit: Runs that the pool lets run at once; None: any number.
        num_workers: Workers that poll the pool.
    """
    at_once = wanted if limit is None else min(wanted, limit)
    return max(1, math.ceil(at_once / max(1, num_workers)))
