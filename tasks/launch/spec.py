"""What a rank is to train, and how it and the process that starts it speak; imports no torch.

Flows, workers and the registration of deployments import this, and would wait seconds for torch, which they never use.
"""

from pydantic import BaseModel, ConfigDict

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.train.identity import run_key

EVENT_MARK = "@lakevision "
"""Lines on stdout with this mark are events for the process that started the rank, as JSON."""

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_ENDED = 130
"""Ended by a signal, as shells say it."""


class RankSpec(BaseModel):
    """What a rank is to train; the file it comes in lies in a folder that nobody else may look into."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: TrainConfig
    distributed: DistributedConfig | None
    cache: CacheRef
    storage: Storage
    tags: dict[str, str] = {}
    repetition: str | None = None
    """Names a repetition, which is trained although the same was trained before."""
    slot: int = 0
    """Number of this training among those that run at once on this machine."""
    num_slots: int = 1
    """How many those are: each has its share of the cores, and a GPU in turn."""

    @property
    def key(self) -> str:
        """The training's name, by everything that decides its result."""
        return run_key(self.train, self.cache, self.distributed, self.repetition)

    @property
    def num_ranks(self) -> int:
        """How many ranks train."""
        return self.distributed.num_ranks if self.distributed else 1
