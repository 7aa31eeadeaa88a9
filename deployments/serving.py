"""Serve an application on a host and port, or on the listening socket that the stack has passed on."""

import argparse
import socket
from contextlib import suppress
from typing import Any

import uvicorn

from deployments.ports import BACKLOG, HOST, LOCAL_NAMES, listen


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options that say where a server listens, and for which host names it answers.

    Args:
        parser: Of the server's command line.
        port: The default port.
    """
    parser.add_argument("--host", default=HOST, help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help="port to listen on")
    parser.add_argument("--fd", type=int, help="inherited socket that listens on that address already")
    parser.add_argument(
        "--allowed-host", action="append", default=[], help=f"a name of this server beside {' and '.join(LOCAL_NAMES)}"
    )


def host_names(address: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of this server, from what `add_address` has read."""
    return (*LOCAL_NAMES, *address.allowed_host)


def listening_socket(address: argparse.Namespace, what: str) -> socket.socket:
    """Return the socket of a server: the inherited one, or a new one.

    Args:
        address: What `add_address` has read.
        what: The server's name, for an error.

    Raises:
        WrongInput: As `listen`.
    """
    if address.fd is None:
        return listen(address.port, what, "give --port (and --host) that are free", address.host)
    inherited = socket.socket(fileno=address.fd)
    inherited.set_inheritable(False)
    return inherited


def serve(app: Any, listening: socket.socket, **settings: Any) -> None:
    """Serve until a signal comes.

    Args:
        app: An ASGI application.
        listening: Of `listening_socket`.
        settings: Of `uvicorn.Config`.
    """
    config = uvicorn.Config(app, backlog=BACKLOG, **settings)
    with suppress(KeyboardInterrupt):  # raised again once all is closed: how a user ends it is no error
        uvicorn.Server(config).run(sockets=[listening])
