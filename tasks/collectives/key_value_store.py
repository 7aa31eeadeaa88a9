"""The launcher's store of values by key, through which ranks find each other: HTTP with a secret.

Horovod's ranks get and put single keys. Those of torch, which asks more of a store, post requests in JSON. The store of
torch itself lets everyone in who reaches its port. Rank 0 would have to choose that port before it is started.
"""

import hmac
import json
import secrets
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

LOOPBACK = "127.0.0.1"

BACKLOG = 4096
"""Connections that wait to be accepted: all ranks connect at once. The system's own limit may be lower."""

WAIT_SECONDS = 1.0
"""Maximum time that a GET waits for a key. Horovod's ranks ask for missing keys a hundred times per second, which would
be most of the traffic of a launcher with many hosts."""

REQUEST_SECONDS = 30.0
"""Time limit for reading a request."""


OPERATIONS = ("set", "get", "add", "compare_and_set", "wait", "delete", "count")
"""Methods of the store that torch's ranks call."""


class StoreAddress(NamedTuple):
    """The address by which ranks reach a store, and the secret that their requests need."""

    host: str
    port: int
    secret: str


class KeyValueStore(socketserver.ThreadingTCPServer):
    """Server of a store on a free port; requests without its secret are refused."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Request)
        self.address = StoreAddress(host, int(self.server_address[1]), secrets.token_hex(16))
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a rank that is killed closes its connection at any point."""

    def end_waits(self) -> None:
        """End all waits for values."""
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

    def get(self, key: str, wait_seconds: float = 0.0) -> bytes | None:
        """Return the value of a key once it is there, or None after the given time."""
        self.wait([key], wait_seconds)
        return self._values.get(key)

    def set(self, key: str, value: Iterable[int]) -> None:
        """Set the value of a key, given as bytes or as their numbers."""
        self._update(key, lambda _before: bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, which is 0 at first; return the sum."""
        return int(self._update(key, lambda before: str(int(before or b"0") + amount).encode()))

    def compare_and_set(self, key: str, expected: Iterable[int], value: Iterable[int]) -> bytes:
        """Set the value of a key if it is the expected one, or if both are missing; return the value, as c10d does."""
        with self._changed:
            before, wanted = self._values.get(key), bytes(expected)
            if before is None and wanted:
                return wanted
            if (before or b"") != wanted:
                return before or b""
            return self._update(key, lambda _before: bytes(value))

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
        return len(self._values)


class _Request(BaseHTTPRequestHandler):
    """A request for /SECRET, or /SECRET:PORT/SCOPE/KEY, as Horovod builds it from the address SERVER:PORT/SECRET."""

    server: KeyValueStore
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer with the value of a key, or 404."""
        key = self._key()
        if key is not None:
            value = self.server.get(key, WAIT_SECONDS)
            self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:  # the name that http.server calls
        """Store the body as the value of a key."""
        key = self._key()
        if key is not None:
            self.server.set(key, self._body())
            self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:  # the name that http.server calls
        """Answer a rank that needs the store no longer; the values stay for the others."""
        if self._key() is not None:
            self._answer(HTTPStatus.OK)

    def do_POST(self) -> None:  # the name that http.server calls
        """Answer a request of torch's ranks: a method of the store and its arguments."""
        if self._key() is not None:
            operation, arguments = json.loads(self._body())
            if operation not in OPERATIONS:
                raise ValueError(f"operation is '{operation}', which does not exist")
            answer = getattr(self.server, operation)(*arguments)
            self._answer(HTTPStatus.OK, json.dumps(answer, default=list).encode())  # bytes as numbers

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that http.server uses
        """Log nothing: the path has the secret in it."""

    def _key(self) -> str | None:
        """Return scope and key of the request, or answer that it is refused."""
        _, given, key = [*self.path.split("/", 2), "", ""][:3]
        if hmac.compare_digest(given.partition(":")[0].encode(), self.server.address.secret.encode()):
            return key
        self._answer(HTTPStatus.FORBIDDEN)
        return None

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)


@contextmanager
def key_value_store(host: str = LOOPBACK) -> Iterator[KeyValueStore]:
    """Run a store on an address of this machine until the end of the block."""
    with KeyValueStore(host) as store:
        thread = threading.Thread(target=store.serve_forever, name="key-value-store", daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.end_waits()
            store.shutdown()
            thread.join()
