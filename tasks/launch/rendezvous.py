"""The rendezvous server through which the Horovod ranks on this machine find each other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer

from tasks.launch.watchdog import START_SECONDS

GLOO_MARGIN_SECONDS = 60
"""Seconds from the watchdog's limit to Gloo's."""


@contextmanager
def ranks_environments(num_ranks: int, stall_seconds: float) -> Iterator[list[dict[str, str]]]:
    """Run Horovod's rendezvous server; yield the environment variables of each rank.

    A single process needs no server and no variables. After `stall_seconds`, Horovod warns of ranks that others wait
    for. It does not end them: unlike the watchdog, it cannot tell slow ranks from stalled ones.

    Horovod's own launcher binds the server to all interfaces, passes the environment on a command line, which `ps`
    shows, and starts each rank in its own session. Here the server listens only on the loopback interface.
    """
    if num_ranks == 1:
        yield [{}]
        return
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    assignments = get_host_assignments(parse_hosts(f"localhost:{num_ranks}"), num_ranks)
    server: HTTPServer = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    server.init(assignments)  # type: ignore[attr-defined]  # Horovod has no types
    thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    thread.start()
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(int(stall_seconds)),
        # After the watchdog, which names the rank that is missing: Gloo only knows that one is.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(max(stall_seconds, START_SECONDS) + GLOO_MARGIN_SECONDS)),
    }
    try:
        yield [shared | create_slot_env_vars(assignment) for assignment in assignments]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
