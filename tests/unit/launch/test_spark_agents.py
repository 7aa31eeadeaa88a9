"""The connections of Spark's agents, whose stage Spark may start again."""

import json
import os
import queue
import socket
import time
from pathlib import Path

from tasks.launch.protocol import Channel
from tasks.launch.rank_process import RankOutput
from tasks.launch.remote import Agent
from tasks.launch.spark_agents import _Connections
from tasks.launch.spark_task import Greeting


def make_agent(greeting: Greeting, channel: Channel) -> Agent:
    """Return an agent whose messages nobody reads."""
    output = RankOutput(queue.Queue(), lambda number, activity: None)
    return Agent(greeting.host, 1, channel, output, lambda: "it ended")


def connect(connections: _Connections, number: int) -> tuple[socket.socket, socket.socket]:
    """Connect an agent; return both ends."""
    own, task = socket.socketpair()
    connections.add(Greeting(number, "node", "node", "127.0.0.1", 1), own)
    return own, task


def test_nothing_is_written_to_a_descriptor_of_a_closed_connection(tmp_path: Path) -> None:
    """It may be another file's at once, which must get none of the beats."""
    connections = _Connections(b"secret", make_agent)
    own, task = connect(connections, 0)
    descriptor = own.fileno()
    (agent,) = connections.agents()
    hello = {"kind": "hello", "versions": {}, "address": None}
    task.sendall(json.dumps(hello).encode() + b"\n")
    agent.wait_until_ready(5)
    time.sleep(2.5)  # longer than the interval of beats
    assert b"beat" in task.recv(1 << 16)
    connections.close()
    assert own.fileno() == -1
    opened = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    reused = os.dup2(opened, descriptor)
    time.sleep(2.5)
    assert (tmp_path / "file").read_bytes() == b""
    for unused in {opened, reused}:
        os.close(unused)
    task.close()


def test_connections_that_come_twice_or_late_are_closed() -> None:
    """An agent that nobody reads would wait for a launcher that is silent."""
    connections = _Connections(b"secret", make_agent)
    own, task = connect(connections, 0)
    second, second_task = connect(connections, 0)
    assert second.fileno() == -1
    assert second_task.recv(1) == b""
    assert len(connections.agents()) == 1
    connections.close()
    late, late_task = connect(connections, 1)
    assert late_task.recv(1) == b""
    assert [own.fileno(), late.fileno()] == [-1, -1]
    for one in (task, second_task, late_task):
        one.close()


def test_agent_that_has_ended_does_not_count() -> None:
    """The ranks do not start without it."""
    connections = _Connections(b"secret", make_agent)
    _own, task = connect(connections, 1)
    (agent,) = connections.agents()
    task.close()
    deadline = time.monotonic() + 10
    while connections.agents():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert agent.has_ended
    connections.close()
