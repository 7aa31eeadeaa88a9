"""Serving of an ASGI application, and the listening sockets of servers, which a stack opens before they start.

If a port were only checked, another user of the machine could listen on it while its server still imports, and would
be sent the login. The stack therefore listens itself, and its server accepts on the inherited socket. Until then,
connections wait in the socket's backlog.
"""

import argparse
import errno
import resource
import socket
from contextlib import suppress
from typing import Any

from tasks.errors import WrongInput

HOST = "127.0.0.1"

LOCAL_NAMES = (HOST, "localhost")
"""Host names by which a browser on this machine may address its servers."""

BACKLOG = 2048
"""Connections that may wait while a server imports; the kernel's limit (net.core.somaxconn) may be lower."""

MAX_FILES = 65_536
"""Open files of a server; a shell often allows 1,024."""


def listen(port: int, what: str, way_out: str, host: str = HOST) -> socket.socket:
    """Return a socket that listens on a port of this machine.

    Args:
        port: The port.
        what: Name of the server, for an error.
        way_out: Advice for an error, besides stopping the process that listens there.
        host: Address to listen on.

    Raises:
        WrongInput: The port is in use, or this user may not listen on it.
    """
    opened = None
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        # As servers do: a port whose last connections are still closing can be bound again.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError as error:
        if opened is not None:
            opened.close()
        if error.errno == errno.EADDRINUSE:
            raise WrongInput(
                f"port {port} for {what} is in use", way_out=f"stop its process ('ss -ltnp' shows it), or {way_out}"
            ) from None
        raise WrongInput(f"{what} cannot listen on {host}, port {port} ({error.strerror})", way_out=way_out) from None
    return opened


def allow_connections() -> None:
    """Let this process and its children have MAX_FILES files or the most that it may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_FILES)), hard))


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def refuse_connections(listening: socket.socket) -> None:
    """Stop listening on the socket of a server that has ended: connections are refused, but the port stays bound."""
    listening.shutdown(socket.SHUT_RDWR)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options for a server's address and host names.

    Args:
        parser: Parser of the server's command line.
        port: Default port.
    """
    parser.add_argument("--host", default=HOST, help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help="port to listen on")
    parser.add_argument("--fd", type=int, help="file descriptor of an inherited socket that already listens there")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        help=f"host name of this server besides {' and '.join(LOCAL_NAMES)}",
    )


def host_names(address: argparse.Namespace) -> tuple[str, ...]:
    """Return the host names of this server, from the options of `add_address`."""
    return (*LOCAL_NAMES, *address.allowed_host)


def listening_socket(address: argparse.Namespace, what: str) -> socket.socket:
    """Return the socket of a server: the inherited one, or a new one.

    Args:
        address: Options of `add_address`.
        what: Name of the server, for an error.

    Raises:
        WrongInput: As `listen`.
    """
    if address.fd is None:
        return listen(address.port, what, "give --port (and --host) that are free", address.host)
    inherited = socket.socket(fileno=address.fd)
    inherited.set_inheritable(False)
    return inherited


def serve(app: Any, listening: socket.socket, **settings: Any) -> None:
    """Serve until a signal is received.

    Args:
        app: An ASGI application.
        listening: Socket from `listening_socket`.
        settings: Further arguments of `uvicorn.Config`.
    """
    import uvicorn  # Here: a stack only listens.

    config = uvicorn.Config(app, backlog=BACKLOG, **settings)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown; Ctrl-C is not an error here
        uvicorn.Server(config).run(sockets=[listening])
