"""Agents as the tasks of a barrier stage of a Spark master, one rank per task."""

import functools
import logging
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from tasks.environment import portable_environment
from tasks.errors import HostLost, WrongInput
from tasks.launch import rank_process
from tasks.launch.channel import Channel
from tasks.launch.handshake import accept_agent
from tasks.launch.remote import Agent, Heard
from tasks.launch.spark_task import Invitation, run_agent
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

    def __init__(self, session: SparkSession, invitation: Invitation, num_ranks: int) -> None:
        self.failure: BaseException | None = None
        self._context = session.sparkContext
        self._ranks = self._context.parallelize(range(num_ranks), num_ranks)
        self._task = functools.partial(run_agent, invitation)
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

    def __init__(self, make_agent: Callable[[str, Channel], Agent]) -> None:
        self._make_agent = make_agent
        self._connected: dict[int, tuple[socket.socket, Agent]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def add(self, number: int, connection: socket.socket) -> None:
        """Take over the connection of a task's agent, which has been greeted."""
        with self._lock:
            if self._is_closed or number in self._connected:
                connection.close()
                return
            channel = Channel(connection.fileno(), connection.fileno())
            self._connected[number] = connection, self._make_agent(f"task {number}", channel)

    def agents(self) -> list[Agent]:
        """Return the agents that are connected, by the numbers of their tasks."""
        with self._lock:
            return [agent for _, (_, agent) in sorted(self._connected.items()) if not agent.has_ended]

    def close(self) -> None:
        """Close all connections, and refuse further ones."""
        with self._lock:
            self._is_closed = True
            _close(list(self._connected.values()))


def _close(connections: Sequence[tuple[socket.socket, Agent]]) -> None:
    """Close connections once nothing reads or writes them: a descriptor that is closed may be another file's soon."""
    for connection, agent in connections:
        agent.close()
        with suppress(OSError):  # The agent may have ended.
            connection.shutdown(socket.SHUT_RDWR)
    for connection, agent in connections:
        agent.join()
        connection.close()


@contextmanager
def spark_agents(
    spec: TrainingSpec, messages: "queue.Queue[rank_process.Message]", heard: Heard, check: Callable[[], None]
) -> Iterator[list[Agent]]:
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
                f"distributed.launcher is 'spark', but the session's master is '{master}', which is this machine: name "
                "the master of a cluster, or set distributed.launcher to local"
            )
        if (slots := num_task_slots(session, check)) < spec.num_ranks:
            has_too_few = f"'{master}' runs {slots} tasks at once, and there are {spec.num_ranks} ranks"
            if spec.restart:
                raise HostLost(f"executors are lost ({has_too_few})", ranks=range(slots, spec.num_ranks))
            raise WrongInput(
                f"distributed.num_ranks is {spec.num_ranks}, but {has_too_few}: give at most {slots}, or more cores, "
                "or fewer cores per task"
            )
        conf, secret = session.sparkContext.getConf(), secrets.token_hex(32)
        reached = str(conf.get("spark.driver.host"))
        bound = str(conf.get("spark.driver.bindAddress") or reached)
        with socket.create_server((bound, 0), backlog=spec.num_ranks + 16) as server:
            invitation = Invitation(
                reached, server.getsockname()[1], secret, portable_environment(spec.train.environment)
            )
            stage = _Stage(session, invitation, spec.num_ranks)
            connections = _Connections(lambda number, channel: Agent(number, 1, channel, messages, heard, _reason))
            finished = False
            try:
                agents = _accept(server, secret, connections, stage, spec.num_ranks, check)
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
    server: socket.socket,
    secret: str,
    connections: _Connections,
    stage: _Stage,
    num_ranks: int,
    check: Callable[[], None],
) -> list[Agent]:
    """Accept the connections of all agents, and return them; others, without the secret, are closed.

    Args:
        server: The listening socket.
        secret: Secret of the training run.
        connections: Takes over their connections.
        stage: The stage that starts them.
        num_ranks: Number of agents.
        check: Called meanwhile; an exception in it ends the wait.

    Raises:
        HostLost: They have not connected in time, or an agent or its executor has ended.
        Exception: The stage failed for another reason.
    """
    deadline = time.monotonic() + CONNECT_SECONDS

    def introduce(connection: socket.socket, address: str) -> None:
        try:
            number = accept_agent(connection, secret)
        except (OSError, ValueError) as error:
            logger.warning("a connection from %s was refused: %s", address, error)
            connection.close()
            return
        connections.add(number, connection)

    server.settimeout(0.5)
    while len(agents := connections.agents()) < num_ranks:
        check()
        if stage.failure is not None:
            if lost := LOST.search(str(stage.failure)):
                raise HostLost(f"Spark has not started all agents ({lost[0]}): the logs of its executors say why")
            raise stage.failure
        if time.monotonic() > deadline:
            raise HostLost(
                f"Spark has started agents for {len(agents)} of {num_ranks} ranks in {CONNECT_SECONDS:.0f} s: "
                "check the logs of its executors, and that they reach this machine"
            )
        with suppress(TimeoutError):
            connection, address = server.accept()
            threading.Thread(target=introduce, args=(connection, address[0]), daemon=True).start()
    return agents
