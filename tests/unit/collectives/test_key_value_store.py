"""The launcher's store of the ranks' addresses, beside torch's own stores."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from tasks.collectives.key_value_store import key_value_store
from tasks.collectives.torch_reducer import LauncherStore
from tasks.environment import Rendezvous


@pytest.fixture
def place() -> Iterator[Rendezvous]:
    """Return the rendezvous of a rank with a running store."""
    with key_value_store() as store:
        yield Rendezvous(0, 2, 0, 2, *store.address)


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
    """Its requests are refused, and others are served."""
    with pytest.raises(ConnectionError, match=r"refused 'count'$"):
        LauncherStore(place._replace(secret="0" * 32), 10).num_keys()
    with socket.create_connection((place.host, place.port)):  # It never asks, and holds nobody up.
        assert LauncherStore(place, 10).num_keys() == 0


def test_waiting_ranks_are_answered_when_the_server_ends() -> None:
    """A launcher that ends does not wait for its ranks' waits."""
    answers: list[str] = []

    def wait(store: LauncherStore) -> None:
        try:
            store.wait(["missing"])
        except (TimeoutError, ConnectionError) as error:
            answers.append(type(error).__name__)

    with key_value_store() as store:
        client = LauncherStore(Rendezvous(0, 2, 0, 2, *store.address), 3600)
        client.add("number", 1)
        thread = threading.Thread(target=wait, args=(client,))
        thread.start()
    thread.join(60)
    assert len(answers) == 1
