"""Parameters of training in one process within the DAG: where it runs."""

from typing import Literal

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.values import YEAR_SECONDS


class SingleConfig(FrozenConfig):
    """Training in one process, where the DAG runs or on a GPU work pool."""

    where: Literal["in_place", "work_pool", "auto"] = Field(
        "in_place",
        description="in_place: train where the flow runs; work_pool: submit a run to the work pool. auto: work_pool if "
        "a Prefect server is configured, else in_place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool of the deployment, whose worker trains")
    deployment: str = Field(
        "train-trial/train-trial", pattern=r"^[^/]+/[^/]+$", description="Deployment to submit, as flow/deployment"
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
