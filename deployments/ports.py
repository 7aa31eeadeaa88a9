"""The ports of a stack's servers, held from the moment that they are found free.

A port that was only checked is free again while its server still imports: another user of the machine could listen on
it and be sent the login. The stack therefore listens itself, and its server accepts on the inherited socket. Until then
connections wait in the socket's backlog.
"""

import errno
import socket

from tasks.errors import WrongInput

HOST = "127.0.0.1"

LOCAL_NAMES = (HOST, "localhost")
"""What a browser on this machine may call its servers."""

BACKLOG = 2048
"""Connections that wait while a server imports; the kernel's own limit (net.core.somaxconn) may be lower."""


def listen(port: int, what: str, way_out: str, host: str = HOST) -> socket.socket:
    """Return a socket that listens on a port of this machine.

    Args:
        port: The port.
        what: What it is for.
        way_out: What to do where the port is in use, other than to stop what listens there.
        host: Address to listen on.

    Raises:
        WrongInput: Something listens there already, or this user may not; names the port, what it is for, and the way
            out.
    """
    made = None
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        # As servers do: a port whose last connections are still closing is free.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        if made is not None:
            made.close()
        if error.errno == errno.EADDRINUSE:
            raise WrongInput(
                f"port {port} for {what} is in use: stop what listens there ('ss -ltnp' names it), or {way_out}"
            ) from None
        raise WrongInput(f"{what} cannot listen on {host}, port {port} ({error.strerror}): {way_out}") from None
    return made


def refuse_connections(listening: socket.socket) -> None:
    """Let a socket listen no more, whose server has ended: who connects is refused, and nobody else gets the port."""
    listening.shutdown(socket.SHUT_RDWR)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
