"""Mutual authentication of an agent and its launcher on a connection, by a secret that does not travel on it.

Each end sends a random number, and proves that it has the secret by a digest of both. Uses only the standard library.
"""

import hmac
import json
import secrets
import socket
from typing import Any

TIMEOUT_SECONDS = 30.0
"""Time limit for each message of the other end."""

MAX_BYTES = 4096
"""Maximum length of a message before the other end is known."""


def accept_agent(connection: socket.socket, secret: str) -> int:
    """Return the number of the agent that has connected.

    Raises:
        PermissionError: It does not have the secret.
        OSError: It does not answer in time, or the connection ended.
    """
    connection.settimeout(TIMEOUT_SECONDS)
    own = secrets.token_hex(32)
    _send(connection, own=own)
    answer = _receive(connection)
    number, other = int(answer["number"]), str(answer["own"])
    _check(answer, secret, f"agent {number}", own, other)
    _send(connection, proof=_proof(secret, "launcher", other, own))
    connection.settimeout(None)
    return number


def greet_launcher(connection: socket.socket, secret: str, number: int) -> None:
    """Show the launcher that this agent has the secret, and check that it has it, too.

    Raises:
        PermissionError: It does not.
        OSError: It does not answer in time, or the connection ended.
    """
    connection.settimeout(TIMEOUT_SECONDS)
    own, other = secrets.token_hex(32), str(_receive(connection)["own"])
    _send(connection, number=number, own=own, proof=_proof(secret, f"agent {number}", other, own))
    _check(_receive(connection), secret, "launcher", own, other)
    connection.settimeout(None)


def _proof(secret: str, role: str, asked: str, own: str) -> str:
    return hmac.new(secret.encode(), f"{role} {asked} {own}".encode(), "sha256").hexdigest()


def _check(message: dict[str, Any], secret: str, role: str, asked: str, own: str) -> None:
    if not hmac.compare_digest(str(message["proof"]).encode(), _proof(secret, role, asked, own).encode()):
        raise PermissionError("the other end of the connection does not have the secret of this training run")


def _send(connection: socket.socket, **fields: Any) -> None:
    connection.sendall(f"{json.dumps(fields)}\n".encode())


def _receive(connection: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):  # Byte by byte: what follows belongs to the channel.
        byte = connection.recv(1)
        if not byte or len(line) > MAX_BYTES:
            raise ConnectionError("the connection ended before both ends had shown that they have the secret")
        line += byte
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if isinstance(message, dict) and {"own", "proof"} & message.keys():
        given = {"own": "", "proof": "", "number": -1} | message
        if isinstance(given["number"], int):
            return given
    raise PermissionError("the other end of the connection is not an agent or a launcher")
