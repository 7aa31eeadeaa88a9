"""The response of the Prefect server while PostgreSQL or Redis does not answer, for which clients repeat a request."""

import errno
import logging
import socket
from collections.abc import Callable

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("lakevision.prefect_server")

UNANSWERED = (ConnectionError, TimeoutError, socket.gaierror, RedisConnectionError, RedisTimeoutError)
"""Errors of a connection that is refused, reset or too slow. Prefect answers them with 500, which ends a run, since its
clients repeat a request after 503 but not after 500."""

UNREACHABLE = (None, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Error numbers of other OSErrors of a connection; asyncio's has none if several addresses of a host failed."""


def is_unanswered(error: Exception) -> bool:
    """Return whether an error is that of a connection, and not of a file or disk of the server itself."""
    return isinstance(error, UNANSWERED) or (type(error) is OSError and error.errno in UNREACHABLE)


class OutageResponse:
    """ASGI middleware that answers with 503 instead of 500 where a request failed because a database did not answer."""

    def __init__(self, app: ASGIApp, is_retryable: Callable[[Exception], bool]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            is_retryable: Whether another error than those of a connection is one of an unavailable database.
        """
        self._app = app
        self._is_retryable = is_retryable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and replace the response to a failed one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[Message] = []
        started = False

        async def hold_errors(message: Message) -> None:
            # A response with 500 is held until its error, which follows it, is known.
            nonlocal started
            if held or (not started and message.get("status") == 500):
                held.append(message)
                return
            started = True
            await send(message)

        try:
            await self._app(scope, receive, hold_errors)
        except Exception as error:
            if not started and (is_unanswered(error) or self._is_retryable(error)):
                logger.warning("%s %s is answered with 503: %r", scope["method"], scope["path"], error)
                unavailable = {"exception_message": "Service Unavailable"}
                await JSONResponse(unavailable, status_code=503)(scope, receive, send)
                return
            for message in held:
                await send(message)
            raise
        for message in held:
            await send(message)
