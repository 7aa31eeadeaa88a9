"""The placement of ranks on hosts, and the environment variables by which those of each backend find each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tasks.collectives.key_value_store import StoreAddress
from tasks.config.distributed import Backend
from tasks.environment import Rendezvous, local_rank_environment
from tasks.launch.watchdog import START_SECONDS, WORK_SECONDS

GLOO_MARGIN_SECONDS = 60
"""Seconds from the watchdog's limit to Gloo's."""


class Place(Protocol):
    """The place of ranks: this machine, or an agent on a host."""

    host: str
    """Name of the machine; two agents on one machine have the same."""
    slots: int
    """Maximum number of ranks."""
    interface: str
    """Network interface over which its ranks exchange gradients."""
    store: StoreAddress | None
    """The launcher's store as its ranks reach it; None for a single process."""


P = TypeVar("P", bound=Place)


@dataclass(frozen=True)
class Placement(Generic[P]):
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
    place: P
    place_size: int
    """Number of ranks at the same place, which share its cores."""


def place_ranks(places: Sequence[P], num_ranks: int) -> list[Placement[P]]:
    """Place ranks host by host, until all are placed; places on one host must be neighbours."""
    indices = [index for index, place in enumerate(places) for _ in range(place.slots)][:num_ranks]
    assert len(indices) == num_ranks, "the settings have a slot for every rank"
    hosts = [places[index].host for index in indices]
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [
        Placement(
            rank=rank,
            size=num_ranks,
            local_rank=local_ranks[rank],
            local_size=hosts.count(host),
            cross_rank=local_ranks[:rank].count(local_ranks[rank]),
            cross_size=local_ranks.count(local_ranks[rank]),
            place=places[index],
            place_size=indices.count(index),
        )
        for rank, (index, host) in enumerate(zip(indices, hosts, strict=True))
    ]


def collective_timeout(stall_seconds: float) -> int:
    """Return the seconds after which a collective operation of torch fails.

    It counts from the first rank that waits, unlike Horovod's. So it is longer than all work that the watchdog allows
    the other ranks, such as computing features.
    """
    return int(max(stall_seconds, WORK_SECONDS) + GLOO_MARGIN_SECONDS)


def rank_variables(backend: Backend, placement: Placement[Any], stall_seconds: float) -> dict[str, str]:
    """Return the environment variables of a rank; a single process without a store needs none of the backend's.

    Args:
        backend: Library that exchanges the gradients.
        placement: The place of the rank.
        stall_seconds: Limit of the watchdog, `train.stall_timeout_seconds`.
    """
    local = local_rank_environment(placement.local_rank, placement.local_size)
    place: Place = placement.place
    if place.store is None:
        return local
    if backend == "horovod":
        return local | _of_horovod(placement, place.store, stall_seconds)
    numbers = placement.rank, placement.size, placement.local_rank, placement.local_size
    interfaces = {"GLOO_SOCKET_IFNAME": place.interface, "NCCL_SOCKET_IFNAME": place.interface}
    return local | Rendezvous(*numbers, *place.store).environment() | interfaces


def _of_horovod(placement: Placement[Any], store: StoreAddress, stall_seconds: float) -> dict[str, str]:
    """Return Horovod's variables.

    After `stall_seconds`, Horovod warns of ranks that others wait for. It does not end them: unlike the watchdog, it
    cannot tell slow ranks from stalled ones.

    Horovod's own launcher binds its store to all interfaces, without a secret, and passes the environment on a command
    line, which `ps` shows.
    """
    host, port, secret = store
    # After the watchdog, which names the rank that is missing: Gloo only knows that one is.
    gloo_seconds = int(max(stall_seconds, START_SECONDS) + GLOO_MARGIN_SECONDS)
    return {
        # Horovod joins address, port and key to a URL: what follows the port in the address becomes part of its path.
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{host}:{port}/{secret}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": placement.place.interface,
        "NCCL_SOCKET_IFNAME": placement.place.interface,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(int(stall_seconds)),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_seconds),
        "HOROVOD_HOSTNAME": placement.place.host,
        "HOROVOD_RANK": str(placement.rank),
        "HOROVOD_SIZE": str(placement.size),
        "HOROVOD_LOCAL_RANK": str(placement.local_rank),
        "HOROVOD_LOCAL_SIZE": str(placement.local_size),
        "HOROVOD_CROSS_RANK": str(placement.cross_rank),
        "HOROVOD_CROSS_SIZE": str(placement.cross_size),
    }
