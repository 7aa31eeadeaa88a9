"""Parameters of distributed training."""

from typing import Literal

from pydantic import Field

from tasks.config.cache import IMAGE_SIZE
from tasks.config.frozen import FrozenConfig
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainRun
from tasks.config.values import YEAR_SECONDS


class DistributedConfig(FrozenConfig):
    """The same training under Horovod, submitted to a GPU work pool."""

    num_ranks: int = Field(2, ge=1, le=4096, description="Number of ranks (processes)")
    scale_learning_rate: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="How the learning rate grows with the number of ranks"
    )
    warmup_epochs: float = Field(
        1.0, ge=0.0, le=10_000.0, description="Epochs over which the learning rate rises to its scaled value"
    )
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="auto submits to the work pool where a Prefect server is configured, and else trains in place",
    )
    work_pool: str = Field("gpu", min_length=1, description="The deployment's work pool, whose worker runs the ranks")
    deployment: str = Field(
        "train-distributed/train-distributed",
        pattern=r"^[^/]+/[^/]+$",
        description="Deployment to submit, flow/deployment",
    )
    submit_timeout_seconds: int = Field(
        300,
        ge=1,
        le=YEAR_SECONDS,
        description="How long the submitted run may wait while no worker polls the pool, in seconds",
    )
    run_timeout_seconds: int = Field(
        86_400, ge=1, le=YEAR_SECONDS, description="How long the submitted run may take, in seconds"
    )
    stall_timeout_seconds: int = Field(
        600,
        ge=61,
        le=YEAR_SECONDS,
        description="Ranks are ended when one waits this long for another (Horovod warns after 60)",
    )
    log_ranks: Literal["rank0", "all"] = Field(
        "rank0", description="Whose lines the log has: rank 0's and the warnings of the others, or the lines of all"
    )


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks where it runs itself."""

    first = NETWORK | IMAGE_SIZE | {"num_ranks": ("distributed", "num_ranks")} | DEVICE_AND_EPOCHS

    distributed: DistributedConfig = DistributedConfig()
