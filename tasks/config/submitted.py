"""Settings of runs that are submitted to a work pool: their types, and those of training in one process in the DAG."""

from typing import Annotated, Literal

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.values import YEAR_SECONDS, Seconds
from tasks.credentials import JobVariables

Deployment = Annotated[
    str, Field(pattern=r"^[^/]+/[^/]+$", description="Deployment of the submitted runs, as flow/deployment")
]

RunJobVariables = Annotated[
    JobVariables,
    Field(
        description="Job variables of a submitted run, in place of those of the work pool: for a process pool such as "
        '{"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, for Docker and Kubernetes also image, memory and GPUs'
    ),
]

SubmitTimeout = Annotated[
    Seconds,
    Field(description="Maximum time that a submitted run waits while no worker polls the pool, in seconds"),
]

StartTimeout = Annotated[
    Seconds,
    Field(
        description="Maximum time from the moment a worker takes a submitted run until its process begins, including "
        "the pull of an image, in seconds"
    ),
]

HeartbeatTimeout = Annotated[
    int,
    Field(
        ge=60,
        le=YEAR_SECONDS,
        description="Time without a heartbeat of a submitted run after which it counts as lost, in seconds; Prefect "
        "sends one every 180 s, or every $PREFECT_FLOWS_HEARTBEAT_FREQUENCY seconds of the worker",
    ),
]

RunTimeout = Annotated[Seconds, Field(description="Timeout of a submitted run, in seconds")]


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
