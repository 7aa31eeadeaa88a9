"""The Prefect server as `prefect server start` runs it, with a host check, safe SQLite transactions and safe outages.

Prefect has no settings for these. The server answers only to its own host names. To a browser, a page whose name
was made to resolve to this machine (DNS rebinding) has the server's origin, so CORS and CSRF checks do not stop it.

On SQLite, transactions that may write acquire the write lock when they begin. A transaction that reads first and is
overtaken by another writer can no longer write, however long it waits ("database is locked").

While PostgreSQL or Redis does not answer, clients are told to repeat their requests, and the wait of the automation for
heartbeats begins anew when the server starts.
"""

import argparse
import asyncio
import errno
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import sqlalchemy as sa
from prefect.server.api.server import create_app, is_client_retryable_exception
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.settings import get_current_settings
from prefect.types._datetime import now
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.stack.pages import PREFECT_ADDITION, WithAddition
from deployments.stack.register import HEARTBEAT_AUTOMATION
from tasks.errors import WrongInput
from tasks.system.listening import add_address, host_names, listening_socket, serve

logger = logging.getLogger("lakevision.prefect_server")

UNANSWERED = (ConnectionError, TimeoutError, socket.gaierror, RedisConnectionError, RedisTimeoutError)
"""Errors of a connection that is refused, reset or too slow. Prefect answers them with 500, which ends a run, since its
clients repeat a request after 503 but not after 500."""

UNREACHABLE = (None, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Error numbers of other OSErrors of a connection; asyncio's has none if several addresses of a host failed."""


class LockingSqlite(AioSqliteConfiguration):
    """SQLite configuration whose transactions all begin with the write lock, for which SQLite lets them wait."""

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        """Begin a transaction; Prefect itself requests the lock (`with_for_update`) in only a few places."""
        async with super().begin_transaction(session, with_for_update=True) as transaction:
            yield transaction


def write_lock_first() -> AbstractContextManager[object]:
    """Make the server's transactions acquire SQLite's write lock when they begin; other databases are unaffected."""
    url = get_current_settings().server.database.connection_url
    if url is None or not url.get_secret_value().startswith("sqlite"):
        return nullcontext()
    return temporary_database_config(LockingSqlite(connection_url=url.get_secret_value()))


async def wait_anew_for_heartbeats() -> None:
    """Restart the time that the automation waits for each run, before the server starts.

    No heartbeat arrives while the server is away: without this, an outage longer than that time would crash all runs.
    """
    database = provide_database_interface()
    engine = await database.engine()
    try:
        async with engine.connect() as connection:
            if not await connection.run_sync(lambda inner: sa.inspect(inner).has_table("automation_bucket")):
                return  # the first start, before the tables are created
        async with database.session_context(begin_transaction=True) as session:
            found = await session.execute(
                sa.select(database.Automation).where(database.Automation.name == HEARTBEAT_AUTOMATION)
            )
            for automation in found.scalars():
                bucket = database.AutomationBucket
                end = now("UTC") + automation.trigger.within
                await session.execute(
                    sa.update(bucket).where(bucket.automation_id == automation.id, bucket.end < end).values(end=end)
                )
    finally:
        await engine.dispose()  # its connections belong to the event loop of this call


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


def guarded_app(hosts: Sequence[str]) -> ASGIApp:
    """Return Prefect's server, UI and background services as an app that refuses requests for other hosts.

    While a database does not answer, clients are told to repeat their requests.
    """
    app = create_app(final=True)
    app.add_middleware(OutageResponse, is_retryable=is_client_retryable_exception)
    # Around the app and not within it: the actions of automations call the app in this process, by a host of their own.
    return TrustedHostMiddleware(WithAddition(app, PREFECT_ADDITION), allowed_hosts=list(hosts), www_redirect=False)


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal is received, and return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    add_address(parser, 4200)
    options = parser.parse_args(arguments)
    settings = get_current_settings().server
    try:
        listening = listening_socket(options, "the Prefect server")
    except WrongInput as error:
        print(f"prefect_server: {error}", file=sys.stderr)
        return 2
    with write_lock_first():
        asyncio.run(wait_anew_for_heartbeats())
        serve(
            guarded_app(host_names(options)),
            listening,
            timeout_keep_alive=settings.api.keepalive_timeout,
            ws_ping_interval=settings.api.websocket_ping_interval,
            ws_ping_timeout=settings.api.websocket_ping_timeout,
            log_level=settings.logging_level.lower(),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
