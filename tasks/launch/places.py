"""The places of a training run's ranks: this machine, or agents on other hosts, checked before ranks start there."""

import ipaddress
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.collectives.key_value_store import StoreAddress, key_value_store
from tasks.environment import portable_environment, rank_environment
from tasks.errors import WrongInput, join_names
from tasks.launch import rank_process
from tasks.launch.code_version import code_versions
from tasks.launch.rank_process import RankOutput, RankProcess
from tasks.launch.remote import Agent
from tasks.launch.rendezvous import place_ranks
from tasks.launch.shared_folders import check_shared
from tasks.launch.ssh import ssh_agents
from tasks.system.cores import num_cores
from tasks.system.slots import Gpus
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

GPU_POLL_SECONDS = 2.0
"""Seconds between two attempts to get the GPUs of all hosts."""


class ThisMachine:
    """This machine, a `Place` that starts all ranks, which exchange gradients over its loopback interface."""

    host, interface = "localhost", "lo"
    is_quiet = False

    def __init__(
        self, spec: TrainingSpec, spec_path: Path, gpus: Gpus, output: RankOutput, store: StoreAddress | None
    ) -> None:
        self.slots, self.store = spec.num_ranks, store
        self.cores = max(1, num_cores() // spec.num_slots)
        self._spec_path = spec_path
        self._output = output
        self._environment = rank_environment(spec.train.environment) | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **gpus.environment,
        }
        self._locks = gpus.locks

    def start(self, number: int, environment: dict[str, str]) -> RankProcess:
        """Start a rank."""
        return rank_process.start(number, self._spec_path, self._environment | environment, self._output, self._locks)


@contextmanager
def open_places(
    spec: TrainingSpec, gpus: Gpus, output: RankOutput, check: Callable[[], None]
) -> Iterator[Sequence[ThisMachine | Agent]]:
    """Yield the places of the ranks; connections to other hosts, and what runs there, end with the block.

    Args:
        spec: The training run.
        gpus: GPUs of ranks on this machine.
        output: Gets the output, events and activities of the ranks.
        check: Called during a wait for executors of Spark, or for GPUs; an exception in it ends the wait.

    Raises:
        WrongInput: A host cannot take part: it is unknown, has another version of the code, or shares no folder.
        HostLost: A host is not reached.
    """
    given_names = spec.train.environment
    given = rank_environment(given_names)
    if unset := [name for name in given_names if name not in given]:
        logger.warning("train.environment names '%s', which is not set where the ranks start", "', '".join(unset))
    if spec.distributed is None or spec.distributed.launcher == "local":
        with ExitStack() as stack:
            path = Path(stack.enter_context(TemporaryDirectory()), "spec.json")
            path.write_text(spec.model_dump_json())
            address = stack.enter_context(key_value_store()).address if spec.num_ranks > 1 else None
            yield [ThisMachine(spec, path, gpus, output, address)]
        return
    over_ssh = spec.distributed.launcher == "hosts"
    # Spark has sent the environment to its tasks: unlike ssh, their connections to this process are not encrypted.
    environment, names = (portable_environment(given_names), ()) if over_ssh else ({}, given_names)
    with ExitStack() as stack:
        if over_ssh:
            store = stack.enter_context(key_value_store())
            agents = stack.enter_context(ssh_agents(spec, store.address, output))
            # Before ssh ends: it would wait for the requests of ranks that wait for a value.
            stack.callback(store.end_waits)
        else:
            from tasks.launch.spark_agents import spark_agents  # Here: other training runs load no pyspark.

            agents = stack.enter_context(spark_agents(spec, output, check))
        _check_versions(agents)
        for agent in agents:
            agent.prepare(spec.model_dump_json(), environment, names, spec.distributed.interface)
        _check_addresses(agents)
        check_shared(spec, agents)
        if over_ssh:  # Spark assigns GPUs itself.
            _take_gpus(spec, agents, check)
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
                f"host '{agent.host}' has another version of this project ({join_names(different, len(different))})",
                way_out="bring it to that of this machine, or correct distributed.host_folder and host_python",
            )


def _check_addresses(agents: Sequence[Agent]) -> None:
    """Check that no host is known only by an address that the other hosts do not reach.

    Raises:
        WrongInput: One host is reached over the loopback interface, and another is not.
    """
    own = [agent for agent in agents if agent.address and ipaddress.ip_address(agent.address).is_loopback]
    if own and len(own) < len(agents):
        raise WrongInput(
            f"host '{own[0].host}' is this machine, reached by {own[0].address}, which the other hosts do not reach",
            setting="distributed.hosts",
            way_out="name it in distributed.hosts by its address in their network",
        )


def _take_gpus(spec: TrainingSpec, agents: Sequence[Agent], check: Callable[[], None]) -> None:
    """Acquire a GPU for each rank on each host, in use until its agent and its ranks have ended.

    Waits while other training runs have too many of them. It acquires the GPUs of all hosts or none, so that two runs
    never wait for each other.

    Args:
        spec: Specification of the training run.
        agents: The agents of the hosts.
        check: Called during the wait; an exception in it ends the wait.

    Raises:
        HostLost: The connection to a host ended.
        WrongInput: The folder of the locks belongs to another user there.
    """
    assert spec.distributed is not None, "a single process runs on this machine"
    device, backend = spec.train.device, spec.distributed.decided_backend
    sizes = {one.place: one.place_size for one in place_ranks(agents, spec.num_ranks)}
    is_logged = False

    def takes(agent: Agent) -> bool:
        answer = agent.ask("take_gpus", device=device, backend=backend, num_ranks=sizes[agent])
        return bool(answer["are_taken"])

    while (missing := next((agent.host for agent in sizes if not takes(agent)), None)) is not None:
        for agent in sizes:
            agent.ask("release_gpus")
        if not is_logged:
            is_logged = True
            logger.info(
                "waiting for GPUs of host '%s', which other training runs, or ranks that have not ended, use", missing
            )
        check()
        time.sleep(GPU_POLL_SECONDS)
