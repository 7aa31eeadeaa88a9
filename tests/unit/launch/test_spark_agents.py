"""The connections of Spark's agents, whose stage Spark may start again."""

import json
import os
import queue
import socket
import time
from pathlib import Path

from tasks.launch.channel import Channel
from tasks.launch.remote import Agent
from tasks.launch.spark_agents import _Connections


def make_agent(host: str, channel: Channel) -> Agent:
    """Return an agent whose messages nobody reads."""
    return Agent(host, 1, channel, queue.Queue(), lambda number, activity: None, lambda: "it ended")


def test_agent_of_an_earlier_attempt_is_replaced_and_nothing_is_written_to_its_descriptor(tmp_path: Path) -> None:
    """The descriptor of its connection may be another file's at once, which must get none of its beats."""
    connections = _Connections(make_agent)
    first, first_task = socket.socketpair()
    descriptor = first.fileno()
    connections.add(0, "first", first)
    second, second_task = socket.socketpair()
    connections.add(0, "second", second)
    opened = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    reused = os.dup2(opened, descriptor)
    (agent,) = connections.agents()
    hello = {"kind": "hello", "versions": {}, "address": "", "host": "", "machine": ""}
    second_task.sendall(json.dumps(hello).encode() + b"\n")
    agent.wait_until_ready(5)
    time.sleep(2.5)  # longer than the interval of beats
    assert b"beat" in second_task.recv(1 << 16)
    assert (tmp_path / "file").read_bytes() == b""
    assert first_task.recv(1) == b""
    for unused in {opened, reused}:
        os.close(unused)

    connections.close()
    late, late_task = socket.socketpair()
    connections.add(0, "second", late)
    assert late_task.recv(1) == b""
    assert second.fileno() == -1
    for task in (first_task, second_task, late_task):
        task.close()


def test_agent_that_has_ended_does_not_count() -> None:
    """A task that failed has to connect again before the ranks start."""
    connections = _Connections(make_agent)
    first, first_task = socket.socketpair()
    connections.add(1, "first", first)
    (agent,) = connections.agents()
    first_task.close()
    deadline = time.monotonic() + 10
    while connections.agents():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert agent.has_ended
    connections.close()


def test_agents_of_two_attempts_are_not_counted_together() -> None:
    """An agent of the earlier attempt may still be connected, or connect only after one of the newer attempt."""
    connections, tasks = _Connections(make_agent), []

    def connect(number: int, attempt: str) -> socket.socket:
        own, task = socket.socketpair()
        connections.add(number, attempt, own)
        tasks.append(task)
        return own

    earlier = connect(0, "first")
    newer = connect(1, "second")
    late = connect(0, "first")
    assert len(connections.agents()) == 1
    connect(0, "second")
    assert len(connections.agents()) == 2
    assert [own.fileno() == -1 for own in (earlier, newer, late)] == [True, False, True]
    connections.close()
    for task in tasks:
        task.close()
