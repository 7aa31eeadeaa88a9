"""What a person fills in on models: ranks, promotion, batch inference."""

from typing import Literal

from pydantic import Field

from tasks.config.storage import Settings
from tasks.config.values import YEAR_SECONDS, ModelName
from tasks.credentials import Url


class DistributedConfig(Settings):
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


class PromoteConfig(Settings):
    """Which run becomes the champion."""

    model_name: ModelName | None = Field(
        None,
        description="Name of the registered model; empty: named after the source, as lakevision-digits or "
        "lakevision-photos-1a2b3c, one for each table",
    )
    min_test_accuracy: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="A run below this accuracy on the split `test` is not promoted; nor is one that is no better than "
        "the champion",
    )


class PredictConfig(Settings):
    """Batch inference with the champion."""

    table: Url | None = Field(
        None,
        description="Delta table with columns sha256 and content, also one that the model was not trained on; empty: "
        "the table `images`",
    )
    predictions: Url | None = Field(None, description="Delta table to write; empty: `predictions` among the tables")
    alias: str = Field(
        "champion", pattern=r"^[a-zA-Z_-]+$", description="Alias of the registered model version to predict with"
    )
    batch_size: int = Field(64, ge=1, le=4096, description="Pictures a forward pass")
