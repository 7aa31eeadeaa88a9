"""Agents as the tasks of a barrier stage of a Spark master, one rank per task."""

import functools
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from tasks.collectives.key_value_store import key_value_store
from tasks.environment import portable_environment
from tasks.errors import HostLost, WrongInput
from tasks.launch.protocol import Channel
from tasks.launch.rank_process import RankOutput
from tasks.launch.remote import Agent
from tasks.launch.spark_task import AgentConfig, Greeting, accept_task, run_agent
from tasks.spark.cluster import is_local, num_task_slots
from tasks.spark.session import spark_session
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.ranks")

CONNECT_SECONDS = 300.0
"""Time limit from the submission of the stage to the greeting of its last agent."""

CLOSE_SECONDS = 15.0
"""Time limit for the end of the stage after its agents were ended; then it is cancelled."""

JOB_GROUP = "lakevision-ranks"

LOST = re.compile(r"the agent of rank \d+ ended with status -?\d+|ExecutorLostFailure[^\n]*")
"""The part of Spark's message on a stage which says that an agent or an executor has ended: a restart may help."""


class _Stage:
    """The barrier stage, which runs as long as its agents do."""

    def __init__(self, session: SparkSession, config: AgentConfig, num_ranks: int) -> None:
        self.failure: BaseException | None = None
        self._context = session.sparkContext
        self._ranks = self._context.parallelize(range(num_ranks), num_ranks)
        self._task = functools.partial(run_agent, config)
        self._thread = InheritableThread(target=self._run, name="spark-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._context.setJobGroup(JOB_GROUP, "agents of ranks", interruptOnCancel=True)
        try:
            self._ranks.barrier().mapPartitions(self._task).collect()
        except BaseException as error:  # Raised again by the launcher, or the reason of a lost connection.
            self.failure = error

    def end(self, *, cancel: bool) -> None:
        """Wait until the stage has ended, and cancel it if it does not."""
        if not cancel:
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._context.cancelJobGroup(JOB_GROUP)
            self._thread.join(CLOSE_SECONDS)


class _Connections:
    """The connections of the agents of a stage.

    Spark ends a barrier stage whose results are collected with its first task that fails, and does not start it again.
    """

    def __init__(self, secret: bytes, make_agent: Callable[[Greeting, Channel], Agent]) -> None:
        self._secret = secret
        self._make_agent = make_agent
        self._connected: dict[int, tuple[socket.socket, Agent]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def introduce(self, connection: socket.socket, address: str) -> None:
        """Take over the connection of a task's agent; one without the secret is closed."""
        try:
            greeting = accept_task(connection, self._secret)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.warning("a connection from %s was refused: %s", address, error)
            connection.close()
            return
        self.add(greeting, connection)

    def add(self, greeting: Greeting, connection: socket.socket) -> None:
        """Take over the connection of a task's agent."""
        with self._lock:
            if self._is_closed or greeting.number in self._connected:
                connection.close()
                return
            channel = Channel(connection.fileno(), connection.fileno())
            self._connected[greeting.number] = connection, self._make_agent(greeting, channel)

    def agents(self) -> list[Agent]:
        """Return the agents that are connected, by the numbers of their tasks."""
        with self._lock:
            return [agent for _, (_, agent) in sorted(self._connected.items()) if not agent.has_ended]

    def close(self) -> None:
        """Close all connections, and refuse further ones."""
        with self._lock:
            self._is_closed = True
        for connection, agent in self._connected.values():
            agent.close()
            with suppress(OSError):  # The agent may have ended.
                connection.shutdown(socket.SHUT_RDWR)
        # Once nothing reads or writes them: a descriptor that is closed may be another file's soon.
        for connection, agent in self._connected.values():
            agent.join()
            connection.close()


@contextmanager
def spark_agents(spec: TrainingSpec, output: RankOutput, check: Callable[[], None]) -> Iterator[list[Agent]]:
    """Start an agent per rank on the executors, and yield them, host by host; end them with the block.

    Raises:
        WrongInput: The master runs fewer tasks at once than there are ranks, or as `spark_session`.
        HostLost: An agent has not connected in time, or has ended before; or after a restart, the master runs fewer
            tasks than ranks.
        ClusterUnavailable, SparkFailed: As `spark_session`.
    """
    assert spec.spark is not None, "the settings of the launcher spark have a Spark master"
    with spark_session(spec.spark, spec.storage) as session:
        master = str(session.sparkContext.master)
        if is_local(master):
            raise WrongInput(
                f"distributed.launcher is 'spark', but the session's master is '{master}', which is this machine",
                setting="distributed.launcher",
                way_out="name the master of a cluster, or set distributed.launcher to local",
            )
        if (slots := num_task_slots(session, check)) < spec.num_ranks:
            has_too_few = f"'{master}' runs {slots} tasks at once, and there are {spec.num_ranks} ranks"
            if spec.restart:
                raise HostLost(f"executors are lost ({has_too_few})", ranks=range(slots, spec.num_ranks))
            raise WrongInput(
                f"distributed.num_ranks is {spec.num_ranks}, but {has_too_few}",
                setting="distributed.num_ranks",
                way_out=f"give at most {slots}, or more cores, or fewer cores per task",
            )
        conf, secret = session.sparkContext.getConf(), secrets.token_bytes(32)
        reached = str(conf.get("spark.driver.host"))
        bound = str(conf.get("spark.driver.bindAddress") or reached)
        with key_value_store(bound) as store, socket.create_server((bound, 0), backlog=spec.num_ranks + 16) as server:

            def make_agent(greeting: Greeting, channel: Channel) -> Agent:
                place = greeting.machine, greeting.address, greeting.cores
                agent = Agent(greeting.host, 1, channel, output, _reason, *place)
                agent.store = store.address._replace(host=reached)
                return agent

            environment = portable_environment(spec.train.environment)
            config = AgentConfig(reached, server.getsockname()[1], secret, environment)
            stage, connections = _Stage(session, config, spec.num_ranks), _Connections(secret, make_agent)
            finished = False
            try:
                agents = _accept(server, connections, stage, spec.num_ranks, check)
                for agent in agents:
                    agent.wait_until_ready(CONNECT_SECONDS)
                yield sorted(agents, key=lambda agent: agent.host)
                finished = True
            finally:
                connections.close()
                stage.end(cancel=not finished)


def _reason() -> str:
    return "the connection to its Spark task ended: its executor's log says why"


def _accept(
    server: socket.socket, connections: _Connections, stage: _Stage, num_ranks: int, check: Callable[[], None]
) -> list[Agent]:
    """Accept the connections of all agents, and return them; others, without the secret, are closed.

    Args:
        server: The listening socket.
        connections: Takes over their connections.
        stage: The stage that starts them.
        num_ranks: Number of agents.
        check: Called meanwhile; an exception in it ends the wait.

    Raises:
        HostLost: They have not connected in time, or an agent or its executor has ended.
        Exception: The stage failed for another reason.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    server.settimeout(0.5)
    while len(agents := connections.agents()) < num_ranks:
        check()
        if stage.failure is not None:
            if lost := LOST.search(str(stage.failure)):
                raise HostLost(
                    f"Spark has not started all agents ({lost[0]})", way_out="the logs of its executors say why"
                )
            raise stage.failure
        if time.monotonic() > deadline:
            raise HostLost(
                f"Spark has started agents for {len(agents)} of {num_ranks} ranks in {CONNECT_SECONDS:.0f} s",
                way_out="check the logs of its executors, and that they reach this machine",
            )
        with suppress(TimeoutError):
            connection, address = server.accept()
            threading.Thread(target=connections.introduce, args=(connection, address[0]), daemon=True).start()
    return agents
