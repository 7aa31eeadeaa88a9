"""A server of values by key in the launcher, by which ranks of the torch backend exchange their addresses.

torch's own TCPStore lets everyone in who reaches its port, which rank 0 would have to choose before it is started. Here
the operating system chooses the port, and a client must know a secret, which is never sent. Requests and answers are
lines of JSON. Uses only the standard library.
"""

import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

BACKLOG = 4096
"""Connections that wait to be accepted: all ranks connect at once. The system's own limit may be lower."""

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a request; addresses have a few hundred bytes."""

CONNECT_SECONDS = 60.0
"""Maximum time for a connection to the server, which runs before the ranks start."""


class KeyValues:
    """Values by key, and ranks that wait for them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until there are values for all keys; return whether there are."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has(keys), seconds)
            return self._has(keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        with self._changed:
            return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._update(key, lambda _before: value)

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, which is 0 at first; return the sum."""
        return int(self._update(key, lambda before: str(int(before or b"0") + amount).encode()))

    def compare_and_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set the value of a key if it is the expected one, or if both are missing; return the value, as c10d does."""
        with self._changed:
            before = self._values.get(key)
            if before is None and expected:
                return expected
            if (before or b"") != expected:
                return before or b""
            return self._update(key, lambda _before: value)

    def _update(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        with self._changed:
            self._values[key] = change(self._values.get(key))
            self._changed.notify_all()
            return self._values[key]

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        """Return the number of keys."""
        with self._changed:
            return len(self._values)

    def answer(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request: its operation and arguments; values are in base64."""
        key, value = request.get("key", ""), b64decode(request.get("value", ""))
        answer: Any = None
        match request["operation"]:
            case "set":
                self.set(key, value)
            case "get":
                answer = self.get(key)
            case "add":
                answer = self.add(key, request["amount"])
            case "compare_and_set":
                answer = self.compare_and_set(key, b64decode(request["expected"]), value)
            case "wait":
                answer = self.wait(request["keys"], request["seconds"])
            case "delete":
                answer = self.delete(key)
            case "count":
                answer = self.count()
            case unknown:
                raise ValueError(f"operation is '{unknown}', which does not exist")
        return b64encode(answer).decode() if isinstance(answer, bytes) else answer


def _proof(secret: str, challenge: bytes) -> bytes:
    return hmac.new(secret.encode(), challenge, hashlib.sha256).hexdigest().encode()


@contextmanager
def serve(host: str, secret: str) -> Iterator[int]:
    """Serve values on a port of an address of this machine within the context; yield the port."""
    values = KeyValues()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            challenge = secrets.token_hex(32).encode()
            self.wfile.write(challenge + b"\n")
            if not hmac.compare_digest(self.rfile.readline(256).strip(), _proof(secret, challenge)):
                return
            while line := self.rfile.readline(MAX_LINE_BYTES):
                self.wfile.write(json.dumps(values.answer(json.loads(line))).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = BACKLOG

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Do nothing: a rank that is killed closes its connection at any point."""

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="key-values", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            values.close()
            server.shutdown()
            thread.join()


class KeyValueClient:
    """A rank's connection to the server."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        """Connect.

        Raises:
            PermissionError: The server has another secret.
            OSError: The server does not answer.
        """
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
        connection.settimeout(None)  # The server bounds each wait.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = connection.makefile("rwb")
        connection.close()  # Closed in fact with the stream.
        self._lock = threading.Lock()
        self._stream.write(_proof(secret, self._stream.readline().strip()) + b"\n")
        self._stream.flush()

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Return the server's answer to an operation.

        Raises:
            ConnectionError: The launcher has ended, or this client has another secret.
        """
        with self._lock:
            self._stream.write(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        if not line:
            raise ConnectionError(
                f"the launcher's server of the ranks' addresses closed the connection in '{operation}'"
            )
        return json.loads(line)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
