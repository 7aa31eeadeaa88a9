"""The specification of one training run, from the flow that asks for it to the function that trains.

Flows, workers and the registration of deployments import this module, so it imports no torch.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.identity import decisive_settings, run_key


class TrainingSpec(BaseModel):
    """One training run: the launcher writes it to a file, and each rank reads it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: TrainConfig
    cache: CacheRef
    storage: Storage
    distributed: DistributedConfig | None = None
    """Settings of the ranks; None for a single process."""
    tags: dict[str, str] = {}
    """Tags of the MLflow run."""
    repetition: str | None = None
    """Name of a repetition, which is trained although the same run was trained before."""
    slot: int = 0
    """Number of this run among those that train at the same time on this machine."""
    num_slots: int = 1
    """Runs that train at the same time: each has its share of the cores, and a GPU in rotation."""

    @property
    def key(self) -> str:
        """Name of the training run, a digest of everything that decides its result."""
        return run_key(self.train, self.cache, self.distributed, self.repetition)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings and data that decide the result; a checkpoint must have the same."""
        return decisive_settings(self.train, self.cache, self.distributed, self.repetition)

    @property
    def num_ranks(self) -> int:
        """Number of processes that train."""
        return self.distributed.num_ranks if self.distributed else 1
