"""Parameters of distributed training, with its hosts: their names and the number of ranks on each, as one setting."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tasks.config import submitted
from tasks.config.cache import IMAGE_SIZE
from tasks.config.frozen import AsBefore, FrozenConfig, hashed_settings
from tasks.config.run import TABLES
from tasks.config.storage import SparkConfig
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainConfig, TrainRun
from tasks.config.values import YEAR_SECONDS, Text
from tasks.credentials import check_url
from tasks.environment import runs_under_spark_submit
from tasks.errors import WrongInput, loggable

MOVED_TO_TRAIN = {"scale_learning_rate", "warmup_epochs"}
"""Former settings of this group; those of `train` with the same names apply to any number of ranks."""

DECISIVE = {"num_ranks", "backend", "gradient_compression", "sync_batch_norm"}
"""Settings that determine the result of training; the others decide the place of the ranks and their failures."""

SUPERVISION = {"stall_timeout_seconds", "max_restarts", "min_ranks", "log_ranks"}
"""Settings of the launcher's supervision, which apply wherever the ranks are."""

Backend = Literal["horovod", "torch"]
GradientCompression = Literal["none", "fp16", "bf16"]

MAX_SLOTS = 4096
"""Maximum number of ranks on one host."""

# No leading '-', which ssh would read as an option, and no user or port, which belong into ssh's configuration.
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}:[1-9][0-9]{0,3}"
_HOSTS = rf"^({_HOST}( ?, ?{_HOST})*)?$"


def parse_hosts(hosts: str, without: Collection[str] = ()) -> list[tuple[str, int]]:
    """Return the names of the hosts and the number of ranks that fit on each, in the given order.

    Args:
        hosts: The setting.
        without: Names of hosts to leave out.
    """
    places = [place.strip().rpartition(":") for place in hosts.split(",") if place.strip()]
    return [(name, int(slots)) for name, _, slots in places if name not in without]


def check_hosts(hosts: str) -> str:
    """Return a valid list of hosts unchanged.

    Raises:
        WrongInput: It is not a list of names and numbers, or names a host twice.
    """
    check_url(hosts)
    if not re.fullmatch(_HOSTS, hosts):
        raise WrongInput(
            f"it is '{loggable(hosts)}', which is not a list of hosts",
            way_out=(
                "write names and numbers of ranks, as node1:4,node2:4, with user, port and key of a host in "
                "ssh's configuration"
            ),
        )
    names = [name for name, _ in parse_hosts(hosts)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WrongInput(
            f"it is '{hosts}', which names '{twice[0]}' twice", way_out="give each host once, with all of its ranks"
        )
    if too_many := [slots for _, slots in parse_hosts(hosts) if slots > MAX_SLOTS]:
        raise WrongInput(f"it is '{hosts}', with {too_many[0]} ranks on a host", way_out=f"give at most {MAX_SLOTS}")
    return hosts


Hosts = Annotated[str, AfterValidator(check_hosts), Field(json_schema_extra={"pattern": _HOSTS})]
"""A list of hosts with their numbers of ranks, such as node1:4,node2:4."""


class DistributedConfig(FrozenConfig):
    """Distributed training, submitted to a GPU work pool."""

    num_ranks: int = Field(2, ge=1, le=4096, description="Number of ranks (processes)")
    backend: Annotated[Literal["auto", "horovod", "torch"], AsBefore("horovod")] = Field(
        "auto",
        description="Library that averages the gradients of the ranks: horovod, or torch (DistributedDataParallel). "
        "Both use Gloo on CPUs and NCCL on GPUs. auto: horovod if its build fits the device, else torch; the machine "
        "that starts the ranks decides",
    )
    gradient_compression: Annotated[GradientCompression, AsBefore("none")] = Field(
        "none",
        description="Number format in which gradients are sent: none (that of the weights), fp16, or bf16 (only with "
        "the backend torch). Half as many bytes per step, with rounding errors",
    )
    sync_batch_norm: Annotated[bool, AsBefore(False)] = Field(
        False,
        description="Batch norm takes the statistics of the batches of all ranks, for small batches per rank; two more "
        "exchanges per layer and step",
    )
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="work_pool: submit a run to the work pool; in_place: start the ranks where the flow runs. auto: "
        "work_pool if a Prefect server is configured, else in_place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool of the deployment, whose worker runs the ranks")
    deployment: submitted.Deployment = "train-distributed/train-distributed"
    job_variables: submitted.RunJobVariables = Field(default_factory=dict)
    submit_timeout_seconds: submitted.SubmitTimeout = 300
    start_timeout_seconds: submitted.StartTimeout = 1800
    heartbeat_timeout_seconds: submitted.HeartbeatTimeout = 900
    run_timeout_seconds: submitted.RunTimeout = 86_400
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
    shared_home: bool = Field(
        True,
        description="storage.home is one folder on all hosts, on a network file system. false: each host has its own "
        "folder at that path, with copies of the checkpoints. Cache, artifacts and tracking must be shared anyway",
    )
    ssh_config: Text = Field("", description="Configuration file for ssh; empty: that of the user")
    stall_timeout_seconds: int | None = Field(
        None, ge=10, le=YEAR_SECONDS, description="For ranks, in place of train.stall_timeout_seconds, in seconds"
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

    @model_validator(mode="before")
    @classmethod
    def _refuse_moved(cls, values: Any) -> Any:
        moved = sorted(MOVED_TO_TRAIN & values.keys()) if isinstance(values, Mapping) else []
        if moved:
            names = " and ".join(f"train.{name}" for name in moved)
            raise WrongInput(
                f"{' and '.join(moved)} of distributed moved to {names}, which apply to any number of ranks",
                way_out="give them there, or leave them out",
            )
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.min_ranks is not None and not self.max_restarts:
            raise WrongInput(
                f"min_ranks is {self.min_ranks}, but max_restarts is 0, so ranks never start again",
                setting="min_ranks",
                way_out="set max_restarts, or leave min_ranks out",
            )
        if self.min_ranks is not None and self.min_ranks > self.num_ranks:
            raise WrongInput(
                f"min_ranks is {self.min_ranks} and num_ranks {self.num_ranks}",
                setting="min_ranks",
                way_out="give at most as many, or leave min_ranks out",
            )
        if self.sync_batch_norm and self.min_ranks not in (None, self.num_ranks):
            raise WrongInput(
                f"min_ranks is {self.min_ranks} with sync_batch_norm, but batch norm of fewer than {self.num_ranks} "
                "ranks sees fewer images at once",
                setting="min_ranks",
                way_out="leave min_ranks out, or set sync_batch_norm to false",
            )
        if self.gradient_compression == "bf16" and self.backend == "horovod":
            raise WrongInput(
                "gradient_compression is 'bf16' with the backend 'horovod', which cannot send bfloat16",
                setting="gradient_compression",
                way_out="set backend to torch, or gradient_compression to fp16 or none",
            )
        if self.launcher == "local" and not self.shared_home:
            raise WrongInput(
                "shared_home is false, but launcher is 'local', whose ranks are on one machine",
                setting="shared_home",
                way_out="set launcher to hosts or spark, or leave shared_home out",
            )
        if self.launcher != "hosts":
            for name in ("hosts", "host_python", "host_folder", "ssh_config"):
                if value := getattr(self, name):
                    raise WrongInput(
                        f"{name} is '{value}', but launcher is '{self.launcher}'",
                        setting=name,
                        way_out=f"set launcher to hosts, or leave {name} out",
                    )
            if self.interface and self.launcher == "local":
                raise WrongInput(
                    f"interface is '{self.interface}', but launcher is 'local', whose ranks use the loopback one",
                    setting="interface",
                    way_out="set launcher to hosts or spark, or leave interface out",
                )
            return self
        slots = sum(slots for _, slots in parse_hosts(self.hosts))
        if not slots:
            raise WrongInput(
                "launcher is 'hosts', but hosts is empty",
                setting="launcher",
                way_out="name them, such as node1:4,node2:4",
            )
        if self.num_ranks > slots:
            raise WrongInput(
                f"num_ranks is {self.num_ranks}, but hosts '{self.hosts}' has places for {slots} ranks",
                setting="num_ranks",
                way_out=f"give at most {slots}, or more hosts",
            )
        return self

    def on_this_machine(self) -> "DistributedConfig":
        """Return settings with the same result for ranks that are started here, without hosts, clusters and pools."""
        return DistributedConfig.model_validate(self.model_dump(include=DECISIVE | SUPERVISION))

    @property
    def decided_backend(self) -> Backend:
        """The backend; horovod as long as auto is not decided (`choose_backend`)."""
        return "horovod" if self.backend == "auto" else self.backend

    def with_backend(self, backend: Backend) -> "DistributedConfig":
        """Return the settings with a decided backend."""
        return self.model_copy(update={"backend": backend})

    def decisive(self) -> dict[str, Any]:
        """Return the settings that determine the result."""
        return hashed_settings(self.with_backend(self.decided_backend), DECISIVE)


def check_options(train: TrainConfig, distributed: DistributedConfig, spark: SparkConfig) -> None:
    """Check the settings of ranks against those of training and of Spark.

    Raises:
        WrongInput: They exclude each other, or the Spark master of the launcher spark is this machine.
    """
    if train.compile and distributed.sync_batch_norm:
        raise WrongInput(
            "train.compile and distributed.sync_batch_norm are true, but a compiled network cannot exchange the "
            "statistics of its layers",
            setting="train.compile",
            way_out="set one of them to false",
        )
    if distributed.launcher == "spark" and spark.master.startswith("local") and not runs_under_spark_submit():
        raise WrongInput(
            f"distributed.launcher is 'spark', but spark.master is '{spark.master}', which is this machine",
            setting="distributed.launcher",
            way_out="name the master of a cluster, or set distributed.launcher to local",
        )


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks in place."""

    first_screen = NETWORK | IMAGE_SIZE | {"num_ranks": ("distributed", "num_ranks")} | DEVICE_AND_EPOCHS | TABLES

    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        check_options(self.train, self.distributed, self.spark)
        return self
