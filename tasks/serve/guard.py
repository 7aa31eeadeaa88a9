"""The guard of a service: host names, origins, key and size of a request before it is read, and waiting connections."""

import asyncio
import hmac
import re
import time
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Paths without the key: the page has no data in it, and an orchestrator has no key."""

PAGE_POLICY = ";".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' blob: data:"),
        *("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
"""What the page may load: nothing but this service's own files, so that no name of a file or class becomes code."""

FEWER = "send fewer or smaller images"
"""The way out of a request that is too large."""

MAX_AT_ONCE = 16
"""Bodies of the largest size that may arrive at once: they are in memory until their images are predicted."""


HEAD_SECONDS = 10.0
"""Longest time between the requests of a connection, in which the rest of a refused body may come."""


class Connection(HttpToolsProtocol):
    """A connection that ends unless a request begins on it in time.

    uvicorn waits without an end for the first request of a connection, and for one of which it has a part.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def on_headers_complete(self) -> None:
        """Let the request begin, whose body and answer have bounds of their own."""
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        if self.cycle.response_complete:  # Otherwise the next one has arrived already.
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


class TooLarge(Exception):
    """The body of a request is larger than it may be."""


class TooMuchAtOnce(Exception):
    """The bodies that arrive at once are larger than they may be."""


class Guard:
    """ASGI middleware that refuses a request with one sentence, or passes it on."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        key: str | None,
        max_bytes: int,
        note: Callable[[str, int, float], None],
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            hosts: Names of the service in requests.
            key: The key; None for none.
            max_bytes: Maximum size of a body.
            note: Called with path, status and seconds of each request.
        """
        # Browsers send names in lower case, and addresses of IPv6 in brackets.
        self._hosts = {f"[{host}]" if ":" in host.strip("[]") and host[0] != "[" else host.lower() for host in hosts}
        self._app, self._max_bytes, self._note = app, max_bytes, note
        self._key = None if key is None else key.encode()
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        if (refused := self._refusal(scope["path"], headers)) is not None:
            self._note(scope["path"], refused[0], time.perf_counter() - began)
            # The connection stays, and uvicorn drops the rest of the body. If it ended with bytes that nobody has read,
            # the client would be sent a reset, and could lose the answer.
            answer = refusal(*refused)
            if "expect" in headers:
                # The client may leave out the body, and its next request would be taken for it.
                answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += (size := len(message.get("body", b"")))
            self._num_bytes += size
            if num_bytes > self._max_bytes:
                raise TooLarge
            if self._num_bytes > MAX_AT_ONCE * self._max_bytes:
                raise TooMuchAtOnce
            return message

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(scope["path"], message["status"], time.perf_counter() - began)
                message["headers"] += [
                    (b"content-security-policy", PAGE_POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        try:
            await self._app(scope, bounded, protected)
        finally:
            self._num_bytes -= num_bytes

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the sentence for a request that is refused."""
        host = headers.get("host", "")
        # A page under a foreign name could otherwise talk to a service that only this machine reaches (DNS rebinding).
        if (name := re.sub(r":\d+$", "", host.lower())) not in self._hosts:
            return 403, f"the host name {name[:100]!r} is not one of this service: add it to serve.allowed_hosts"
        # Browsers send a form of files to any address without asking.
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}", f"https://{host}"}:
            return 403, "requests of pages from other origins are refused"
        if self._key is not None and path not in OPEN_PATHS and not path.startswith("/page/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            known = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if not known:
                return 401, "give the key of the service in a header: 'Authorization: Bearer KEY'"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_bytes:
            return 413, f"the request has {length[:20]} bytes, more than {self._max_bytes}: {FEWER}"
        return None


def refusal(status: int, sentence: str) -> JSONResponse:
    """Return the answer for a request that is refused."""
    again = {"Retry-After": "1"}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: again, 503: again}.get(status)
    return JSONResponse({"detail": sentence}, status, headers)
