"""The environment variables by which the ranks of each backend find each other, on one machine or on several."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasks.config.distributed import Backend
from tasks.environment import Rendezvous, local_rank_environment
from tasks.launch.key_value_store import key_value_store
from tasks.launch.placement import Placement
from tasks.launch.watchdog import START_SECONDS, WORK_SECONDS

GLOO_MARGIN_SECONDS = 60
"""Seconds from the watchdog's limit to Gloo's."""

LOOPBACK = "127.0.0.1"


def gloo_timeout(stall_seconds: float) -> int:
    """Return the seconds after which a collective operation fails.

    After the watchdog, which names the rank that is missing: Gloo only knows that one is.
    """
    return int(max(stall_seconds, START_SECONDS) + GLOO_MARGIN_SECONDS)


def collective_timeout(stall_seconds: float) -> int:
    """Return the seconds after which a collective operation of torch fails.

    It counts from the first rank that waits, unlike Horovod's. So it is longer than all work that the watchdog allows
    the other ranks, such as computing features.
    """
    return int(max(stall_seconds, WORK_SECONDS) + GLOO_MARGIN_SECONDS)


Reach = Callable[[int, int], int]
"""Maps the index of a place and a port here to the port of its loopback interface by which the place reaches it."""


@contextmanager
def ranks_environments(
    backend: Backend,
    placements: Sequence[Placement],
    stall_seconds: float,
    reach: Reach = lambda _place, port: port,
) -> Iterator[list[dict[str, str]]]:
    """Run the rendezvous server of a backend; yield the environment variables of each rank.

    A single process needs no server. A server listens only on the loopback interface and has a secret; hosts reach it
    through the connections of their agents.

    Args:
        backend: Library that exchanges the gradients.
        placements: The ranks.
        stall_seconds: Limit of the watchdog, `distributed.stall_timeout_seconds`.
        reach: Way of the places to the server.
    """
    local = [local_rank_environment(one.local_rank, one.local_size) for one in placements]
    if len(placements) == 1:
        yield local
        return
    if backend == "torch":
        server = torch_environments(placements, reach)
    else:
        server = horovod_environments(placements, stall_seconds, reach)
    with server as environments:
        yield [variables | environment for variables, environment in zip(local, environments, strict=True)]


@contextmanager
def torch_environments(
    placements: Sequence[Placement], reach: Reach = lambda _place, port: port
) -> Iterator[list[dict[str, str]]]:
    """Run the server of the ranks' addresses for torch; yield the environment variables of each rank."""
    from tasks.launch.key_values import serve

    secret = secrets.token_hex(32)
    with serve(LOOPBACK, secret) as port:
        ports = {place: reach(place, port) for place in {one.place for one in placements}}
        yield [
            Rendezvous(
                one.rank, one.size, one.local_rank, one.local_size, LOOPBACK, ports[one.place], secret
            ).environment()
            | {"GLOO_SOCKET_IFNAME": one.interface, "NCCL_SOCKET_IFNAME": one.interface}
            for one in placements
        ]


@contextmanager
def horovod_environments(
    placements: Sequence[Placement], stall_seconds: float, reach: Reach = lambda _place, port: port
) -> Iterator[list[dict[str, str]]]:
    """Run Horovod's key-value store; yield the environment variables of each rank.

    After `stall_seconds`, Horovod warns of ranks that others wait for. It does not end them: unlike the watchdog, it
    cannot tell slow ranks from stalled ones.

    Horovod's own launcher binds its store to all interfaces, without a secret, and passes the environment on a command
    line, which `ps` shows.
    """
    with key_value_store() as store:
        ports = {place: reach(place, store.port) for place in {one.place for one in placements}}
        yield [_of_horovod(one, ports[one.place], store.secret, stall_seconds) for one in placements]


def _of_horovod(placement: Placement, port: int, secret: str, stall_seconds: float) -> dict[str, str]:
    return {
        # Horovod joins address, port and key to a URL: what follows the port in the address becomes part of its path.
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{LOOPBACK}:{port}/{secret}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": placement.interface,
        "NCCL_SOCKET_IFNAME": placement.interface,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(int(stall_seconds)),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_timeout(stall_seconds)),
        "HOROVOD_HOSTNAME": placement.host,
        "HOROVOD_RANK": str(placement.rank),
        "HOROVOD_SIZE": str(placement.size),
        "HOROVOD_LOCAL_RANK": str(placement.local_rank),
        "HOROVOD_LOCAL_SIZE": str(placement.local_size),
        "HOROVOD_CROSS_RANK": str(placement.cross_rank),
        "HOROVOD_CROSS_SIZE": str(placement.cross_size),
    }
