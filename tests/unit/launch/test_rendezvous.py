"""The environment by which Horovod's ranks find each other, the store behind it, and their time limits."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import httpx
import pytest

from tasks.collectives.key_value_store import StoreAddress, key_value_store
from tasks.environment import local_rank_environment
from tasks.launch.rendezvous import place_ranks, rank_variables
from tests.builders.local_ranks import Loopback, local_environments
from tests.builders.processes import ROOT

# Rank 1 never begins the operation that rank 0 waits in.
RANK = """
import sys, time
import horovod.torch as hvd
import torch
hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(1), name="gradient")
sys.stdin.read()
"""


@dataclass(frozen=True)
class Host:
    """A place with ranks."""

    host: str = "localhost"
    slots: int = 2
    interface: str = "lo"
    store: StoreAddress | None = None


def test_single_process_needs_no_rendezvous() -> None:
    """It gets no variable of Horovod's."""
    (placement,) = place_ranks([Loopback(1)], 1)
    assert rank_variables("horovod", placement, float("inf")) == local_rank_environment(0, 1)


@pytest.mark.parametrize(
    ("slots", "num_ranks", "places"),
    [
        ([("a", 2), ("b", 1)], 3, [("a", 0, 2, 0, 2, 0), ("a", 1, 2, 0, 1, 0), ("b", 0, 1, 1, 2, 1)]),
        ([("a", 2), ("b", 2)], 2, [("a", 0, 2, 0, 1, 0), ("a", 1, 2, 0, 1, 0)]),
        # Two agents on one host, as with Spark: its ranks share the host's cores and GPUs.
        ([("a", 1), ("a", 1), ("b", 1)], 3, [("a", 0, 2, 0, 2, 0), ("a", 1, 2, 0, 1, 1), ("b", 0, 1, 1, 2, 2)]),
        ([("a", 1), ("b", 2)], 3, [("a", 0, 1, 0, 2, 0), ("b", 0, 2, 1, 2, 1), ("b", 1, 2, 0, 1, 1)]),
    ],
)
def test_ranks_are_placed_host_by_host(
    slots: list[tuple[str, int]], num_ranks: int, places: list[tuple[str, int, int, int, int, int]]
) -> None:
    """A rank has its number on its host, and among the ranks with the same number on other hosts."""
    hosts = [Host(host, number) for host, number in slots]
    placements = place_ranks(hosts, num_ranks)
    assert [one.rank for one in placements] == list(range(num_ranks))
    indices = [next(index for index, host in enumerate(hosts) if host is one.place) for one in placements]
    assert places == [
        (one.place.host, one.local_rank, one.local_size, one.cross_rank, one.cross_size, index)
        for one, index in zip(placements, indices, strict=True)
    ]


def test_each_place_reaches_the_store_by_its_own_port() -> None:
    """The secret is the same, and the port is that of the place."""
    stores = [StoreAddress("127.0.0.1", port, "secret") for port in (7000, 7001)]
    places = [Host("a", 1, store=stores[0]), Host("b", 1, interface="eth0", store=stores[1])]
    environments = [rank_variables("horovod", one, 60) for one in place_ranks(places, 2)]
    addresses = [one["HOROVOD_GLOO_RENDEZVOUS_ADDR"].split("/") for one in environments]
    assert [address for address, _ in addresses] == ["127.0.0.1:7000", "127.0.0.1:7001"]
    assert {secret for _, secret in addresses} == {"secret"}
    assert [one["HOROVOD_GLOO_RENDEZVOUS_PORT"] for one in environments] == ["7000", "7001"]
    assert [one["HOROVOD_GLOO_IFACE"] for one in environments] == ["lo", "eth0"]


def test_store_refuses_requests_without_its_secret() -> None:
    """Only a key that is set is found, and none without the secret."""
    with key_value_store() as store, httpx.Client(base_url=f"http://127.0.0.1:{store.address.port}") as client:
        place = f"/{store.address.secret}:{store.address.port}/global_"
        assert client.put(f"{place}/0", content=b"address").status_code == 200
        found = client.get(f"{place}/0")
        assert (found.status_code, found.content) == (200, b"address")
        assert client.get(f"{place}/1").status_code == 404
        for path in ("/global_/0", f"/{'0' * 32}:{store.address.port}/global_/0", "/", "/0"):
            assert client.get(path).status_code == 403
            assert client.put(path, content=b"other").status_code == 403
        assert store.get("global_/0") == b"address"


def test_request_waits_for_its_key() -> None:
    """A rank that asks before another one has answered gets the value without asking again."""
    with key_value_store() as store:
        timer = threading.Timer(0.2, lambda: store.set("global_/1", b"address"))
        timer.start()
        assert store.get("global_/1", wait_seconds=60) == b"address"
        timer.join()


@pytest.mark.parametrize(("stall_seconds", "gloo"), [(10, 360), (600, 660)])
def test_gloo_gives_up_only_after_the_watchdog(stall_seconds: int, gloo: int) -> None:
    """Its limit follows from the setting, and is longer than that of a rank's start."""
    with local_environments("horovod", 2, stall_seconds) as environments:
        assert [one["HOROVOD_RANK"] for one in environments] == ["0", "1"]
        assert {one["HOROVOD_GLOO_TIMEOUT_SECONDS"] for one in environments} == {str(gloo)}
        assert {one["HOROVOD_STALL_CHECK_TIME_SECONDS"] for one in environments} == {str(stall_seconds)}


@pytest.mark.timeout(660)
def test_horovod_finds_a_stalled_rank() -> None:
    """The wheel is patched: without the patch, Horovod over Gloo waits forever and does not say for which rank."""
    with local_environments("horovod", 2, 1) as environments:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                cwd=ROOT,
                env=os.environ | environment | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for environment in environments
        ]
        try:
            # They import torch first, which takes minutes on a busy machine.
            output, _ = ranks[0].communicate(timeout=300)
            ranks[1].communicate(timeout=300)
        finally:
            for rank in ranks:
                rank.kill()
    assert ranks[0].returncode != 0
    assert "Missing ranks:\n1!: [allreduce.gradient]" in output
