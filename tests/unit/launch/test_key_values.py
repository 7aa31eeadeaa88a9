"""The launcher's server of the ranks' addresses, beside torch's own stores."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from tasks.environment import Rendezvous
from tasks.launch.key_values import KeyValueClient, serve
from tasks.launch.torch_reducer import LauncherStore

SECRET = "five words that nobody guesses"  # noqa: S105  # of the test


@pytest.fixture
def place() -> Iterator[Rendezvous]:
    """Return the rendezvous of a rank with a running server."""
    with serve("127.0.0.1", SECRET) as port:
        yield Rendezvous(0, 2, 0, 2, "127.0.0.1", port, SECRET)


def use(store: Store) -> list[object]:
    """Use every operation of a store that sets no value twice in another way; return the answers."""
    store.set("text", "one")
    store.set("bytes", b"\x00\xff")
    return [
        store.get("text"),
        store.get("bytes"),
        store.add("number", 2),
        store.add("number", 3),
        store.get("number"),
        store.check(["text", "number"]),
        store.check(["text", "missing"]),
        store.compare_set("text", "one", "two"),
        store.compare_set("text", "one", "three"),
        store.compare_set("new", "", "first"),
        store.compare_set("absent", "expected", "value"),
        store.delete_key("text"),
        store.delete_key("text"),
        store.check(["text"]),
    ]


def test_store_answers_as_those_of_torch(place: Rendezvous) -> None:
    """Process groups use it as any other store, and its clones have the same values."""
    ours = LauncherStore(place, 10)

    assert use(ours) == use(HashStore())
    assert ours.clone().get("new") == b"first"
    assert ours.num_keys() == ours.getNumKeys() == 3


def test_rank_waits_for_the_value_of_another(place: Rendezvous) -> None:
    """A value that is set later ends the wait; a value that is not set in time is named."""
    waiting, other = LauncherStore(place, 60), LauncherStore(place, 60)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(waiting.get("address")))
    thread.start()
    other.set("address", b"127.0.0.1:4242")
    thread.join(60)

    assert found == [b"127.0.0.1:4242"]
    with pytest.raises(TimeoutError, match=r"^no rank set 'nowhere' within 0 s$"):
        waiting.wait(["nowhere"], timedelta(seconds=0))


def test_client_without_the_secret_gets_nothing(place: Rendezvous) -> None:
    """The connection is closed before the first request is read, and others are served."""
    with pytest.raises(ConnectionError, match=r"closed the connection in 'count'$"):
        KeyValueClient(place.host, place.port, "another secret").ask("count")
    with socket.create_connection((place.host, place.port)) as silent:
        silent.recv(100)  # It gets the challenge, never answers, and holds nobody up.
        assert KeyValueClient(place.host, place.port, SECRET).ask("count") == 0


def test_waiting_ranks_are_answered_when_the_server_ends() -> None:
    """A launcher that ends does not wait for its ranks' waits."""
    answers: list[object] = []
    with serve("127.0.0.1", SECRET) as port:
        client = KeyValueClient("127.0.0.1", port, SECRET)
        client.ask("add", key="number", amount=1)
        thread = threading.Thread(target=lambda: answers.append(client.ask("wait", keys=["missing"], seconds=3600)))
        thread.start()
    thread.join(60)
    assert answers in ([False], [])
