"""The specification of a training run, passed from the flow to the ranks, and its key.

This module does not import torch, since flows, workers and the registration of deployments import it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.config.distributed import DistributedConfig
from tasks.config.recipe import FineTuningPlan
from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.model.pretrained import weights_identity
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.system.slots import Slot


class TrainingSpec(BaseModel):
    """Specification of a training run, written to a file by the launcher and read by each rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: TrainConfig
    cache: CacheRef
    storage: Storage
    distributed: DistributedConfig | None = None
    """Settings of distributed training; None for a single process."""
    backend_reason: str = ""
    """Reason for the backend, which the launcher has decided."""
    spark: SparkConfig | None = None
    """Spark session of the launcher spark; None for the others."""
    tags: dict[str, str] = {}
    """Tags of the MLflow run."""
    plan: FineTuningPlan | None = None
    """Plan of the fine-tuning that a run to repeat has recorded; None: it is planned when the head is trained."""
    repetition: str | None = None
    """Id of a repetition of a finished run, which makes it a run of its own."""
    slot: Slot | None = None
    """Slot on this machine that the caller holds (`take_slot`); None: the launcher takes a GPU."""
    num_slots: int = 1
    """Number of concurrent runs on this machine, which share its cores."""
    restart: int = 0
    """Number of restarts after losses before this start."""
    ranks_left: int | None = None
    """Number of ranks after the loss of a host; None: `distributed.num_ranks`."""
    lost_hosts: tuple[str, ...] = ()
    """Hosts on which the launcher starts no rank any more."""

    @property
    def key(self) -> str:
        """Key of the training run, a digest of everything that decides its result."""
        return run_key(self.train, self.cache, self.distributed, self.repetition)

    @property
    def keys(self) -> list[str]:
        """Keys by which the training run is found: `key`, then that of older releases if it was another one."""
        return run_keys(self.train, self.cache, self.distributed, self.repetition)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings and data that decide the result; a checkpoint must have the same."""
        return decisive_settings(self.train, self.cache, self.distributed, self.repetition)

    @property
    def stall_limit(self) -> tuple[str, int]:
        """Setting of the time without progress after which the launcher ends the training processes, in seconds."""
        if self.distributed is not None and self.distributed.stall_timeout_seconds is not None:
            return "distributed.stall_timeout_seconds", self.distributed.stall_timeout_seconds
        return "train.stall_timeout_seconds", self.train.stall_timeout_seconds

    @property
    def shares_home(self) -> bool:
        """True if all ranks have the same folder of checkpoints."""
        return self.distributed is None or self.distributed.shared_home

    @property
    def num_virtual_ranks(self) -> int:
        """Number of ranks that decide the result: a lost rank's batches are taken by the others."""
        return self.distributed.num_ranks if self.distributed else 1

    @property
    def num_ranks(self) -> int:
        """Number of training processes."""
        return self.num_virtual_ranks if self.ranks_left is None else self.ranks_left


def run_key(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> str:
    """Return the key of a training run, a digest of everything that decides its result."""
    return key_of(decisive_settings(train, cache, distributed, repetition))


def run_keys(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None = None
) -> list[str]:
    """Return the keys by which a training run is found: its own, then that of older releases if it was another one.

    Older releases counted `TrainConfig.neutral` as settings that decide the result. With the backend auto, the run of
    either backend is found; the launcher has the keys of the backend that it decided on, and of Horovod.
    """
    if distributed is not None and distributed.backend == "auto":
        either = distributed.with_backend("horovod"), distributed.with_backend("torch")
        return [key for settings in either for key in run_keys(train, cache, settings, repetition)]
    decisive = decisive_settings(train, cache, distributed, repetition)
    given = decisive["train"] | {name: getattr(train, name) for name in train.neutral}
    return list(dict.fromkeys([key_of(decisive), key_of(decisive | {"train": given})]))


def key_of(decisive: Mapping[str, Any]) -> str:
    """Return the key of `decisive_settings`."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def decisive_settings(
    train: TrainConfig, cache: CacheRef, distributed: DistributedConfig | None, repetition: str | None
) -> dict[str, Any]:
    """Return the settings and data that decide the result; a checkpoint must have the same."""
    decisive: dict[str, Any] = {
        "cache": cache.digest,
        # By content: a changed file at the same path, or other weights of torchvision, make another run; the same
        # file at another path does not.
        "train": train.decisive() | weights_identity(train.model, train.weights),
        "ranks": None if distributed is None else distributed.decisive(),
    }
    if repetition is not None:
        decisive["repetition"] = repetition
    return decisive
