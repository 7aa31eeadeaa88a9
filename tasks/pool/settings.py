"""What a person sets of work that may run on a work pool, and how its worker is started."""

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
