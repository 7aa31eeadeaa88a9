"""The listening sockets of a stack's servers, opened before the servers start.

If a port were only checked, another user of the machine could listen on it while its server still imports, and would
be sent the login. The stack therefore listens itself, and its server accepts on the inherited socket. Until then,
connections wait in the socket's backlog.
"""

import errno
import socket

from tasks.errors import WrongInput

HOST = "127.0.0.1"

LOCAL_NAMES = (HOST, "localhost")
"""Host names by which a browser on this machine may address its servers."""

BACKLOG = 2048
"""Connections that may wait while a server imports; the kernel's limit (net.core.somaxconn) may be lower."""


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
                f"port {port} for {what} is in use: stop its process ('ss -ltnp' shows it), or {way_out}"
            ) from None
        raise WrongInput(f"{what} cannot listen on {host}, port {port} ({error.strerror}): {way_out}") from None
    return opened


def refuse_connections(listening: socket.socket) -> None:
    """Stop listening on the socket of a server that has ended: connections are refused, but the port stays bound."""
    listening.shutdown(socket.SHUT_RDWR)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
