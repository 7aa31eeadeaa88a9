"""The environment variables by which Horovod's ranks find each other, on one machine or on several."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasks.environment import local_rank_environment
from tasks.launch.key_value_store import key_value_store
from tasks.launch.placement import Placement
from tasks.launch.watchdog import START_SECONDS

GLOO_MARGIN_SECONDS = 60
"""Seconds from the watchdog's limit to Gloo's."""


@contextmanager
def ranks_environments(
    placements: Sequence[Placement], stall_seconds: float, reach: Callable[[int, int], int] = lambda _place, port: port
) -> Iterator[list[dict[str, str]]]:
    """Run the store of the rendezvous; yield the environment variables of each rank.

    A single process needs no store. After `stall_seconds`, Horovod warns of ranks that others wait for. It does not end
    them: unlike the watchdog, it cannot tell slow ranks from stalled ones.

    Horovod's own launcher binds its store to all interfaces, without a secret, and passes the environment on a command
    line, which `ps` shows. Here the store listens only on the loopback interface, and hosts reach it through the
    connections of their agents.

    Args:
        placements: The ranks.
        stall_seconds: Limit of the watchdog, `distributed.stall_timeout_seconds`.
        reach: Returns the port of the loopback interface by which a place, given by its index, reaches a port here.
    """
    local = [local_rank_environment(one.local_rank, one.local_size) for one in placements]
    if len(placements) == 1:
        yield local
        return
    with key_value_store() as store:
        ports = {place: reach(place, store.port) for place in {one.place for one in placements}}
        yield [
            variables | _horovod(one, ports[one.place], store.secret, stall_seconds)
            for one, variables in zip(placements, local, strict=True)
        ]


def _horovod(placement: Placement, port: int, secret: str, stall_seconds: float) -> dict[str, str]:
    return {
        # Horovod joins address, port and key to a URL: what follows the port in the address becomes part of its path.
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{port}/{secret}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": placement.interface,
        "NCCL_SOCKET_IFNAME": placement.interface,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(int(stall_seconds)),
        # After the watchdog, which names the rank that is missing: Gloo only knows that one is.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(max(stall_seconds, START_SECONDS) + GLOO_MARGIN_SECONDS)),
        "HOROVOD_HOSTNAME": placement.host,
        "HOROVOD_RANK": str(placement.rank),
        "HOROVOD_SIZE": str(placement.size),
        "HOROVOD_LOCAL_RANK": str(placement.local_rank),
        "HOROVOD_LOCAL_SIZE": str(placement.local_size),
        "HOROVOD_CROSS_RANK": str(placement.cross_rank),
        "HOROVOD_CROSS_SIZE": str(placement.cross_size),
    }
