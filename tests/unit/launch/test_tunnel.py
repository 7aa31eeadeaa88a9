"""The connection of an agent and its launcher: messages, forwarded connections and mutual authentication."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tasks.launch import channel as channel_module
from tasks.launch.channel import STRAY, Channel
from tasks.launch.handshake import accept_agent, greet_launcher
from tasks.launch.key_value_store import key_value_store
from tasks.launch.tunnel import KINDS, Tunnel


@contextmanager
def connected() -> Iterator[tuple[Channel, Channel]]:
    """Yield the two ends of a connection."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        ends = Channel(one.fileno(), one.fileno()), Channel(other.fileno(), other.fileno())
        yield ends
        for end in ends:
            end.close()


def serve(channel: Channel, tunnel: Tunnel) -> threading.Thread:
    """Handle the messages of a tunnel in a thread."""

    def handle() -> None:
        for message in channel.receive():
            if message["kind"] in KINDS:
                tunnel.handle(message)

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    return thread


def request(port: int, text: str) -> bytes:
    """Send a request of HTTP, and return the answer up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(text.encode())
        answer = b""
        while data := connection.recv(1000):
            answer += data
        return answer


def test_tunnel_forwards_an_allowed_port_and_no_other() -> None:
    """A request at one end is answered by the server at the other, and its connection is closed at both."""
    with key_value_store() as store, connected() as (launcher, agent):
        here, there = Tunnel(launcher), Tunnel(agent)
        threads = [serve(launcher, here), serve(agent, there)]
        here.allow(store.port)
        store.put("global_/0", os.urandom(200_000))
        answer = request(there.listen(store.port), f"GET /{store.secret}/global_/0 HTTP/1.0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.0 200")
        assert answer.endswith(store.get("global_/0") or b"none")
        assert request(there.listen(store.port + 1), "GET / HTTP/1.0\r\n\r\n") == b""
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


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
    monkeypatch.setattr(channel_module, "SILENT_SECONDS", 2)
    monkeypatch.setattr(channel_module, "BEAT_SECONDS", 0.1)
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


@pytest.mark.parametrize(("secret", "accepted"), [("secret", True), ("other", False)])
def test_agent_and_launcher_prove_that_they_have_the_secret(secret: str, accepted: bool) -> None:  # a case
    """Neither sends the secret, and each refuses the other without it."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        failures: list[Exception] = []

        def greet() -> None:
            try:
                greet_launcher(other, secret, 7)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=greet)
        thread.start()
        if accepted:
            assert accept_agent(one, "secret") == 7
        else:
            with pytest.raises(PermissionError, match="does not have the secret of this training run"):
                accept_agent(one, "secret")
            one.close()
        thread.join(timeout=60)
        assert [type(error) for error in failures] == ([] if accepted else [ConnectionError])


@pytest.mark.parametrize(
    "answer", [b"[]\n", b"no JSON\n", b'{"own": "1", "number": null}\n', b'{"own": "1", "number": []}\n']
)
def test_program_that_is_no_agent_is_refused(answer: bytes) -> None:
    """The launcher handles PermissionError: it closes the connection."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        other.sendall(answer)
        with pytest.raises(PermissionError, match="is not an agent or a launcher"):
            accept_agent(one, "secret")
