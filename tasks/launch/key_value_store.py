"""The key-value store through which ranks find each other: HTTP on the loopback interface, with a secret."""

import hmac
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tasks.launch.key_values import BACKLOG

WAIT_SECONDS = 1.0
"""Maximum time that a request waits for a key. Horovod's ranks ask for missing keys a hundred times per second, which
would be most of the traffic of a launcher with many hosts."""

REQUEST_SECONDS = 30.0
"""Time limit for reading a request."""


class KeyValueStore(ThreadingHTTPServer):
    """Server of a store on a free port of the loopback interface; requests without its secret are refused."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.secret = secrets.token_hex(16)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    @property
    def port(self) -> int:
        """Port on which the store listens."""
        return int(self.server_address[1])

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, wait_seconds: float = WAIT_SECONDS) -> bytes | None:
        """Return the value of a key once it is there, or None after the given time."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while key not in self._values and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._values.get(key)


class _Request(BaseHTTPRequestHandler):
    """A request for /SECRET:PORT/SCOPE/KEY, as Horovod builds it from the address SERVER:PORT/SECRET."""

    server: KeyValueStore
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer with the value of a key, or 404."""
        key = self._key()
        if key is not None:
            value = self.server.get(key)
            self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:  # the name that http.server calls
        """Store the body as the value of a key."""
        key = self._key()
        if key is not None:
            self.server.put(key, self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:  # the name that http.server calls
        """Answer a rank that needs the store no longer; the values stay for the others."""
        if self._key() is not None:
            self._answer(HTTPStatus.OK)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that http.server uses
        """Log nothing: the path has the secret in it."""

    def _key(self) -> str | None:
        """Return scope and key of the request, or answer that it is refused."""
        _, given, key = [*self.path.split("/", 2), "", ""][:3]
        if hmac.compare_digest(given.partition(":")[0].encode(), self.server.secret.encode()):
            return key
        self._answer(HTTPStatus.FORBIDDEN)
        return None

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)


@contextmanager
def key_value_store() -> Iterator[KeyValueStore]:
    """Run a store until the end of the block."""
    with KeyValueStore() as store:
        thread = threading.Thread(target=store.serve_forever, name="key-value-store", daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()
