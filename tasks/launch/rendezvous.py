"""The rendezvous server through which the Horovod ranks on this machine find each other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer


@contextmanager
def ranks_environments(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Run Horovod's rendezvous server; yield the environment variables of each rank.

    A single process needs no server and no variables.

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
        # Ranks load data and weights before they first connect, which may exceed Gloo's default of 30 s.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
    }
    try:
        yield [shared | create_slot_env_vars(assignment) for assignment in assignments]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
