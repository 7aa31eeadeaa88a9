"""The placement of ranks: which rank runs on which host, and its number among the ranks there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Place(Protocol):
    """The place of ranks: this machine, or an agent on a host."""

    @property
    def host(self) -> str:
        """Name of the machine; two agents on one machine have the same."""

    @property
    def slots(self) -> int:
        """Maximum number of ranks."""

    @property
    def address(self) -> str:
        """Address by which the other hosts reach this one."""

    @property
    def interface(self) -> str:
        """Network interface over which its ranks exchange gradients."""


@dataclass(frozen=True)
class Placement:
    """The place of one rank."""

    rank: int
    size: int
    """Number of all ranks."""
    local_rank: int
    """Number among the ranks on the same host."""
    local_size: int
    cross_rank: int
    """Number among the ranks with the same `local_rank`, one per host."""
    cross_size: int
    host: str
    address: str
    interface: str
    place: int
    """Index of the place among the given ones."""
    place_size: int
    """Number of ranks at the same place, which share its cores."""


@dataclass(frozen=True)
class Loopback:
    """This machine as the place of all ranks, which exchange gradients over its loopback interface."""

    slots: int
    host: str = "localhost"
    address: str = "127.0.0.1"
    interface: str = "lo"


def place_here(num_ranks: int) -> list[Placement]:
    """Place all ranks on this machine."""
    return place_ranks([Loopback(num_ranks)], num_ranks)


def place_ranks(places: Sequence[Place], num_ranks: int) -> list[Placement]:
    """Place ranks host by host, until all are placed; places on one host must be neighbours."""
    indices = [index for index, place in enumerate(places) for _ in range(place.slots)][:num_ranks]
    assert len(indices) == num_ranks, "the settings have a slot for every rank"
    hosts = [places[index].host for index in indices]
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    order = list(dict.fromkeys(hosts))
    peers = {number: [host for host in order if hosts.count(host) > number] for number in set(local_ranks)}
    return [
        Placement(
            rank=rank,
            size=num_ranks,
            local_rank=local_ranks[rank],
            local_size=hosts.count(host),
            cross_rank=peers[local_ranks[rank]].index(host),
            cross_size=len(peers[local_ranks[rank]]),
            host=host,
            address=places[index].address,
            interface=places[index].interface,
            place=index,
            place_size=indices.count(index),
        )
        for rank, (index, host) in enumerate(zip(indices, hosts, strict=True))
    ]
