"""Parameters of training in one process within the DAG: where it runs."""

from typing import Literal

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.submitted import (
    Deployment,
    HeartbeatTimeout,
    RunJobVariables,
    RunTimeout,
    StartTimeout,
    SubmitTimeout,
)


class SingleConfig(FrozenConfig):
    """Training in one process, where the DAG runs or on a GPU work pool."""

    where: Literal["in_place", "work_pool", "auto"] = Field(
        "in_place",
        description="in_place: train where the flow runs; work_pool: submit a run to the work pool. auto: work_pool if "
        "a Prefect server is configured, else in_place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool of the deployment, whose worker trains")
    deployment: Deployment = "train-trial/train-trial"
    job_variables: RunJobVariables = Field(default_factory=dict)
    submit_timeout_seconds: SubmitTimeout = 300
    start_timeout_seconds: StartTimeout = 1800
    heartbeat_timeout_seconds: HeartbeatTimeout = 900
    run_timeout_seconds: RunTimeout = 86_400
