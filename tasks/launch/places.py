"""The places of a training run's ranks: this machine, or agents on other hosts, checked before ranks start there."""

import ipaddress
import logging
import os
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from tasks.environment import portable_environment, rank_environment
from tasks.errors import WrongInput, join_names
from tasks.launch import rank_process
from tasks.launch.code_version import code_versions
from tasks.launch.gpus import take_gpus_of_hosts
from tasks.launch.placement import Loopback, Place
from tasks.launch.rank_process import RankProcess
from tasks.launch.remote import Agent, Heard
from tasks.launch.shared_folders import check_shared
from tasks.launch.ssh import ssh_agents
from tasks.system.cores import num_cores
from tasks.system.slots import Gpus
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")


class StartingPlace(Place, Protocol):
    """A place that starts ranks."""

    @property
    def cores(self) -> int:
        """Number of cores that its ranks share."""

    @property
    def is_quiet(self) -> bool:
        """True if it may be lost: nothing was heard of it for some seconds."""

    def reach(self, port: int) -> int:
        """Return the port of its loopback interface that leads to a port of this machine's."""

    def start(self, number: int, environment: dict[str, str]) -> RankProcess:
        """Start a rank."""


class ThisMachine(Loopback):
    """This machine, which starts all ranks."""

    is_quiet = False

    def __init__(
        self,
        spec: TrainingSpec,
        spec_path: Path,
        gpus: Gpus,
        messages: "queue.Queue[rank_process.Message]",
        heard: Heard,
    ) -> None:
        super().__init__(spec.num_ranks)
        self.cores = max(1, num_cores() // spec.num_slots)
        self._spec_path = spec_path
        self._messages = messages
        self._heard = heard
        self._environment = rank_environment(spec.train.environment) | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **gpus.environment,
        }
        self._locks = gpus.locks

    def reach(self, port: int) -> int:
        """Return the port itself."""
        return port

    def start(self, number: int, environment: dict[str, str]) -> RankProcess:
        """Start a rank."""
        return rank_process.start(
            number, self._spec_path, self._environment | environment, self._messages, self._heard, self._locks
        )


@contextmanager
def open_places(
    spec: TrainingSpec,
    gpus: Gpus,
    messages: "queue.Queue[rank_process.Message]",
    heard: Heard,
    check: Callable[[], None],
) -> Iterator[Sequence[StartingPlace]]:
    """Yield the places of the ranks; connections to other hosts, and what runs there, end with the block.

    Args:
        spec: The training run.
        gpus: GPUs of ranks on this machine.
        messages: Queue for the output and events of its ranks.
        heard: Called with the activities of its ranks.
        check: Called during a wait for executors of Spark, or for GPUs; an exception in it ends the wait.

    Raises:
        WrongInput: A host cannot take part: it is unknown, has another version of the code, or shares no folder.
        HostLost: A host is not reached.
    """
    given = rank_environment(spec.train.environment)
    if unset := [name for name in spec.train.environment if name not in given]:
        logger.warning("train.environment names '%s', which is not set where the ranks start", "', '".join(unset))
    if spec.distributed is None or spec.distributed.launcher == "local":
        with TemporaryDirectory() as scratch:
            path = Path(scratch, "spec.json")
            path.write_text(spec.model_dump_json())
            yield [ThisMachine(spec, path, gpus, messages, heard)]
        return
    with _agents(spec, messages, heard, check) as agents:
        _check_versions(agents)
        # Spark has sent the environment to its tasks: unlike ssh, their connections to this process are not encrypted.
        over_ssh = spec.distributed.launcher == "hosts"
        environment = portable_environment(spec.train.environment) if over_ssh else {}
        for agent in agents:
            agent.prepare(spec.model_dump_json(), environment, spec.distributed.interface)
        _check_addresses(agents)
        check_shared(spec, agents)
        if over_ssh:  # Spark assigns GPUs itself.
            take_gpus_of_hosts(spec, agents, check)
        yield agents


@contextmanager
def _agents(
    spec: TrainingSpec, messages: "queue.Queue[rank_process.Message]", heard: Heard, check: Callable[[], None]
) -> Iterator[list[Agent]]:
    if spec.distributed is not None and spec.distributed.launcher == "hosts":
        with ssh_agents(spec, messages, heard) as agents:
            yield agents
        return
    from tasks.launch.spark_agents import spark_agents  # Here: other training runs load no pyspark.

    with spark_agents(spec, messages, heard, check) as agents:
        yield agents


def _check_versions(agents: Sequence[Agent]) -> None:
    """Check that all hosts have this version of the code and of the packages.

    Raises:
        WrongInput: One has another.
    """
    own = code_versions()
    for agent in agents:
        different = [
            f"{name} {agent.versions.get(name, 'none')} there and {here} here"
            for name, here in own.items()
            if agent.versions.get(name) != here
        ]
        if different:
            raise WrongInput(
                f"host '{agent.host}' has another version of this project ({join_names(different, len(different))}): "
                "bring it to that of this machine, or correct distributed.host_folder and host_python"
            )


def _check_addresses(agents: Sequence[Agent]) -> None:
    """Check that no host is known only by an address that the other hosts do not reach.

    Raises:
        WrongInput: One host is reached over the loopback interface, and another is not.
    """
    own = [agent for agent in agents if agent.address and ipaddress.ip_address(agent.address).is_loopback]
    if own and len(own) < len(agents):
        raise WrongInput(
            f"host '{own[0].host}' is this machine, reached by {own[0].address}, which the other hosts do not reach: "
            "name it in distributed.hosts by its address in their network"
        )
