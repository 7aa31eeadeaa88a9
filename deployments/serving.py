"""Serving of an ASGI application, on a host and port or on a listening socket inherited from the stack."""

import argparse
import socket
from contextlib import suppress
from typing import Any

import uvicorn

from deployments.ports import BACKLOG, HOST, LOCAL_NAMES, listen


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
    config = uvicorn.Config(app, backlog=BACKLOG, **settings)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown; Ctrl-C is not an error here
        uvicorn.Server(config).run(sockets=[listening])
