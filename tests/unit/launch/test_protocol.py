"""The connection of an agent and its launcher: messages, and mutual authentication with Spark."""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import AuthenticationError

import pytest

from tasks.errors import HostLost, WrongInput
from tasks.launch import protocol, spark_task
from tasks.launch.protocol import STRAY, Channel
from tasks.launch.rank_process import RankOutput, RankProcess, RemoteProcess
from tasks.launch.remote import Agent
from tasks.launch.spark_task import Greeting, accept_task, greet_launcher


@contextmanager
def connected() -> Iterator[tuple[Channel, Channel]]:
    """Yield the two ends of a connection."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        ends = Channel(one.fileno(), one.fileno()), Channel(other.fileno(), other.fileno())
        yield ends
        for end in ends:
            end.close()


def test_lines_that_are_not_messages_are_told_apart() -> None:
    """A shell may print a greeting before the first message."""
    read, write = os.pipe()
    with open(write, "wb") as pipe:
        pipe.write(b'Welcome\n{"a": 1}\n{"kind": "beat"}\nhalf of a li')
    received = list(Channel(read, read).receive())
    os.close(read)
    assert received == [{"kind": STRAY, "value": "Welcome"}, {"kind": STRAY, "value": '{"a": 1}'}, {"kind": "beat"}]


def test_silent_connection_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut network closes no connection; beats keep a quiet one open."""
    monkeypatch.setattr(protocol, "SILENT_SECONDS", 2)
    monkeypatch.setattr(protocol, "BEAT_SECONDS", 0.1)
    with connected() as (launcher, agent):
        received = []

        def receive() -> None:
            received.extend(message["kind"] for message in launcher.receive())

        thread = threading.Thread(target=receive)
        agent.start_beats()
        thread.start()
        thread.join(timeout=4)
        assert thread.is_alive()
        agent.close()  # It sends nothing more, and the connection stays open.
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert set(received) == {"beat"}


def test_what_a_rank_has_reported_stays_the_cause_if_its_host_ends_then() -> None:
    """Wrong input is not retried; the other ranks of the host are lost with it."""
    with connected() as (launcher, agent):
        output = RankOutput(queue.Queue(), lambda _number, _activity: None)
        host = Agent("one", 2, launcher, output, lambda: "its process ended")
        ranks = [RankProcess(number, RemoteProcess(number, launcher)) for number in range(2)]
        ranks[0].failure = reported = WrongInput("train.batch_size is too large")
        host._ranks.update(enumerate(ranks))
        agent.send("ending", reason="its process ended")
        agent.close()
        while ranks[1].failure is None:
            time.sleep(0.01)

        assert ranks[0].failure is reported
        assert isinstance(ranks[1].failure, HostLost)
        host.close()


GREETING = Greeting(7, "node-gpu-0", "node", "10.0.0.7", 4)


@pytest.mark.parametrize(("secret", "accepted"), [(b"secret", True), (b"other", False)])
def test_agent_and_launcher_prove_that_they_have_the_secret(secret: bytes, accepted: bool) -> None:  # a case
    """Neither sends the secret, and each refuses the other without it."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        failures: list[Exception] = []

        def greet() -> None:
            try:
                greet_launcher(other, secret, GREETING)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=greet)
        thread.start()
        if accepted:
            assert accept_task(one, b"secret") == GREETING
        else:
            with pytest.raises(AuthenticationError):
                accept_task(one, b"secret")
            one.close()
        thread.join(timeout=60)
        assert [type(error) for error in failures] == ([] if accepted else [AuthenticationError])


@pytest.mark.parametrize("answer", [b"[]\n", b"no JSON\n", b"\0\0\0\2[]", b"\0\0\x10\0" + bytes(4096)])
def test_program_that_is_no_agent_is_refused(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher handles these errors: it closes the connection, at the latest after its time limit."""
    monkeypatch.setattr(spark_task, "TIMEOUT_SECONDS", 1)
    one, other = socket.socketpair()
    with closing(one), closing(other):
        other.sendall(answer)
        with pytest.raises((OSError, AuthenticationError)):
            accept_task(one, b"secret")
