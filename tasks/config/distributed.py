"""Parameters of distributed training."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tasks.config.cache import IMAGE_SIZE
from tasks.config.form import Schema, must_be, when, when_given
from tasks.config.frozen import FrozenConfig
from tasks.config.hosts import Hosts, parse_hosts
from tasks.config.storage import SparkConfig
from tasks.config.submitted import (
    Deployment,
    HeartbeatTimeout,
    RunJobVariables,
    RunTimeout,
    StartTimeout,
    SubmitTimeout,
)
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainRun
from tasks.config.values import YEAR_SECONDS, Text

MOVED_TO_TRAIN = {"scale_learning_rate", "warmup_epochs"}
"""Former settings of this group; those of `train` with the same names apply to any number of ranks."""


class DistributedConfig(FrozenConfig):
    """Distributed training with Horovod, submitted to a GPU work pool."""

    rules: ClassVar[tuple[Schema, ...]] = (
        when("launcher", "hosts", {"required": ["hosts"], "properties": {"hosts": {"minLength": 1}}}),
        when_given("hosts", must_be("launcher", "hosts")),
    )

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
    launcher: Literal["local", "hosts", "spark"] = Field(
        "local",
        description="local: the ranks run where the flow runs. hosts: on the machines in `hosts`, over ssh. spark: as "
        "tasks of the Spark master, one rank per task",
    )
    hosts: Hosts = Field(
        "",
        description="Machines of the launcher hosts, each with its number of ranks, such as node1:4,node2:4. User, "
        "port and key are those of ssh's configuration, and a password cannot be given",
    )
    host_python: Text = Field(
        "", description="Path of the Python interpreter on the hosts; empty: the same path as on this machine"
    )
    host_folder: Text = Field(
        "",
        description="Folder on the hosts that contains this package, a checkout of the same version; empty: the same "
        "path as on this machine",
    )
    interface: Text = Field(
        "",
        description="Network interface of the hosts over which ranks exchange gradients, such as ib0; empty: the one "
        "by which this machine reaches each host",
    )
    ssh_config: Text = Field("", description="Configuration file for ssh; empty: that of the user")
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

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.launcher != "hosts":
            if self.hosts:
                raise ValueError(
                    f"hosts is '{self.hosts}', but launcher is '{self.launcher}': set launcher to hosts, or leave "
                    "hosts out"
                )
            return self
        slots = sum(slots for _, slots in parse_hosts(self.hosts))
        if not slots:
            raise ValueError("launcher is 'hosts', but hosts is empty: name them, such as node1:4,node2:4")
        if self.num_ranks > slots:
            raise ValueError(
                f"num_ranks is {self.num_ranks}, but hosts '{self.hosts}' has places for {slots} ranks: give at most "
                f"{slots}, or more hosts"
            )
        return self


def check_launcher(distributed: DistributedConfig, spark: SparkConfig) -> None:
    """Check that the launcher spark has a cluster.

    Raises:
        ValueError: The Spark master is this machine.
    """
    if distributed.launcher == "spark" and spark.master.startswith("local"):
        raise ValueError(
            f"distributed.launcher is 'spark', but spark.master is '{spark.master}', which is this machine: name the "
            "master of a cluster, or set distributed.launcher to local"
        )


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks in place."""

    first_screen = NETWORK | IMAGE_SIZE | {"num_ranks": ("distributed", "num_ranks")} | DEVICE_AND_EPOCHS

    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _check_launcher(self) -> Self:
        check_launcher(self.distributed, self.spark)
        return self
