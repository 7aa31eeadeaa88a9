"""Where the ranks of a training on this machine find each other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer


@contextmanager
def ranks_environments(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Run the server over which Horovod's ranks find each other; yield what each adds to its environment.

    A single process has nobody to find: no server, and nothing to add.

    Horovod's own launcher binds this server to all interfaces, passes the environment on a command line, where `ps`
    shows it, and leads each rank in a session of its own. Here it listens on the loopback interface alone.
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
        # Ranks load data and weights before they first meet; Gloo's own limit of 30 s is too short for that.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
    }
    try:
        yield [shared | create_slot_env_vars(assignment) for assignment in assignments]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
