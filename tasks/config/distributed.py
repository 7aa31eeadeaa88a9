"""Parameters of distributed training."""

from typing import Literal

from pydantic import Field

from tasks.config.cache import IMAGE_SIZE
from tasks.config.frozen import FrozenConfig
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainRun
from tasks.config.values import YEAR_SECONDS


class DistributedConfig(FrozenConfig):
    """Distributed training with Horovod, submitted to a GPU work pool."""

    num_ranks: int = Field(2, ge=1, le=4096, description="Number of ranks (processes)")
    scale_learning_rate: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="Scaling of the learning rate with the number of ranks; sqrt: with its square root"
    )
    warmup_epochs: float = Field(
        1.0, ge=0.0, le=10_000.0, description="Epochs over which the learning rate rises to its scaled value"
    )
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="work_pool: submit a run to the work pool; in_place: start the ranks where the flow runs. auto: "
        "work_pool if a Prefect server is configured, else in_place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool of the deployment, whose worker runs the ranks")
    deployment: str = Field(
        "train-distributed/train-distributed",
        pattern=r"^[^/]+/[^/]+$",
        description="Deployment to submit, as flow/deployment",
    )
    submit_timeout_seconds: int = Field(
        300,
        ge=1,
        le=YEAR_SECONDS,
        description="Maximum time that the submitted run waits while no worker polls the pool, in seconds",
    )
    run_timeout_seconds: int = Field(
        86_400, ge=1, le=YEAR_SECONDS, description="Timeout of the submitted run, in seconds"
    )
    stall_timeout_seconds: int = Field(
        600,
        ge=10,
        le=YEAR_SECONDS,
        description="Time without progress of a rank after which all ranks are ended, in seconds. Longer than any "
        "training step; work of unknown length, such as compiling or logging the model, may take an hour",
    )
    log_ranks: Literal["rank0", "all"] = Field(
        "rank0",
        description="rank0: log the lines of rank 0 and the warnings of the others; all: log the lines of every rank",
    )


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks in place."""

    first_screen = NETWORK | IMAGE_SIZE | {"num_ranks": ("distributed", "num_ranks")} | DEVICE_AND_EPOCHS

    distributed: DistributedConfig = DistributedConfig()
