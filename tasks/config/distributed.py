"""Parameters of distributed training."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tasks.config.cache import IMAGE_SIZE
from tasks.config.frozen import FrozenConfig
from tasks.config.submitted import (
    Deployment,
    HeartbeatTimeout,
    RunJobVariables,
    RunTimeout,
    StartTimeout,
    SubmitTimeout,
)
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainRun
from tasks.config.values import YEAR_SECONDS

MOVED_TO_TRAIN = {"scale_learning_rate", "warmup_epochs"}
"""Former settings of this group; those of `train` with the same names apply to any number of ranks."""


class DistributedConfig(FrozenConfig):
    """Distributed training with Horovod, submitted to a GPU work pool."""

    num_ranks: int = Field(2, ge=1, le=4096, description="Number of ranks (processes)")
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="work_pool: submit a run to the work pool; in_place: start the ranks where the flow runs. auto: "
        "work_pool if a Prefect server is configured, else in_place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool of the deployment, whose worker runs the ranks")
    deployment: Deployment = "train-distributed/train-distributed"
    job_variables: RunJobVariables = Field(default_factory=dict)
    submit_timeout_seconds: SubmitTimeout = 300
    start_timeout_seconds: StartTimeout = 1800
    heartbeat_timeout_seconds: HeartbeatTimeout = 900
    run_timeout_seconds: RunTimeout = 86_400
    stall_timeout_seconds: int = Field(
        600,
        ge=10,
        le=YEAR_SECONDS,
        description="Time without progress of a rank after which all ranks are ended, in seconds. Longer than any "
        "training step; work of unknown length, such as compiling or logging the model, may take an hour",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="Number of times that the ranks are started again from the last checkpoint after ranks were "
        "killed, stalled or lost with their host. 0: the flow that runs them decides",
    )
    min_ranks: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Minimum number of ranks after the loss of a host; those left take the batches of the others, so "
        "that images per step and result stay the same. Empty: num_ranks",
    )
    log_ranks: Literal["rank0", "all"] = Field(
        "rank0",
        description="rank0: log the lines of rank 0 and the warnings of the others; all: log the lines of every rank",
    )

    @model_validator(mode="after")
    def _check_min_ranks(self) -> Self:
        if self.min_ranks is not None and self.min_ranks > self.num_ranks:
            raise ValueError(
                f"min_ranks is {self.min_ranks} and num_ranks {self.num_ranks}: give at most as many, or leave "
                "min_ranks out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_moved(cls, values: Any) -> Any:
        moved = sorted(MOVED_TO_TRAIN & values.keys()) if isinstance(values, Mapping) else []
        if moved:
            names = " and ".join(f"train.{name}" for name in moved)
            raise ValueError(
                f"{' and '.join(moved)} of distributed moved to {names}, which apply to any number of ranks: give them "
                "there, or leave them out"
            )
        return values


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks in place."""

    first_screen = NETWORK | IMAGE_SIZE | {"num_ranks": ("distributed", "num_ranks")} | DEVICE_AND_EPOCHS

    distributed: DistributedConfig = DistributedConfig()
