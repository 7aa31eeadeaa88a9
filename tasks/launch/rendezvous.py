"""The rendezvous servers through which the ranks on this machine find each other, one for each backend."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer

from tasks.config.distributed import Backend
from tasks.environment import Rendezvous
from tasks.launch.watchdog import START_SECONDS

GLOO_MARGIN_SECONDS = 60
"""Seconds from the watchdog's limit to Gloo's."""

ADDRESS, INTERFACE = "127.0.0.1", "lo"
"""Address and network interface of ranks on one machine."""


def gloo_timeout(stall_seconds: float) -> int:
    """Return the seconds after which a collective operation fails.

    After the watchdog, which names the rank that is missing: Gloo only knows that one is.
    """
    return int(max(stall_seconds, START_SECONDS) + GLOO_MARGIN_SECONDS)


@contextmanager
def ranks_environments(backend: Backend, num_ranks: int, stall_seconds: float) -> Iterator[list[dict[str, str]]]:
    """Run the rendezvous server of a backend; yield the environment variables of each rank.

    A single process needs no server and no variables.

    Args:
        backend: Library that exchanges the gradients.
        num_ranks: Number of ranks.
        stall_seconds: The watchdog's limit, `distributed.stall_timeout_seconds`.
    """
    if num_ranks == 1:
        yield [{}]
        return
    if backend == "torch":
        with torch_environments(num_ranks) as environments:
            yield environments
    else:
        with horovod_environments(num_ranks, stall_seconds) as environments:
            yield environments


@contextmanager
def torch_environments(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Run the server of the ranks' addresses; yield the environment variables of each rank."""
    from tasks.launch.key_values import serve

    secret = secrets.token_hex(32)
    with serve(ADDRESS, secret) as port:
        yield [
            Rendezvous(rank, num_ranks, rank, num_ranks, ADDRESS, port, secret).environment()
            | {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
            for rank in range(num_ranks)
        ]


@contextmanager
def horovod_environments(num_ranks: int, stall_seconds: float) -> Iterator[list[dict[str, str]]]:
    """Run Horovod's rendezvous server; yield the environment variables of each rank.

    After `stall_seconds`, Horovod warns of ranks that others wait for. It does not end them: unlike the watchdog, it
    cannot tell slow ranks from stalled ones.

    Horovod's own launcher binds the server to all interfaces, passes the environment on a command line, which `ps`
    shows, and starts each rank in its own session. Here the server listens only on the loopback interface.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    assignments = get_host_assignments(parse_hosts(f"localhost:{num_ranks}"), num_ranks)
    server: HTTPServer = RendezvousHTTPServer((ADDRESS, 0), RendezvousHandler, 0)
    server.init(assignments)  # type: ignore[attr-defined]  # Horovod has no types
    thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    thread.start()
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(int(stall_seconds)),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_timeout(stall_seconds)),
    }
    try:
        yield [shared | create_slot_env_vars(assignment) for assignment in assignments]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
