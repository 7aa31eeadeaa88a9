"""The Prefect server as `prefect server start` runs it, with a host check and safe SQLite transactions.

Prefect has no settings for these two. The server answers only to its own host names. To a browser, a page whose name
was made to resolve to this machine (DNS rebinding) has the server's origin, so CORS and CSRF checks do not stop it.

On SQLite, transactions that may write acquire the write lock when they begin. A transaction that reads first and is
overtaken by another writer can no longer write, however long it waits ("database is locked").
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from prefect.server.api.server import create_app, is_client_retryable_exception
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.settings import get_current_settings
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from deployments.outage import OutageResponse
from deployments.serving import add_address, host_names, listening_socket, serve
from deployments.triggers import wait_anew_for_heartbeats
from tasks.errors import WrongInput


class LockingSqlite(AioSqliteConfiguration):
    """SQLite configuration whose transactions all begin with the write lock, for which SQLite lets them wait."""

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        """Begin a transaction; Prefect itself requests the lock (`with_for_update`) in only a few places."""
        async with super().begin_transaction(session, with_for_update=True) as transaction:
            yield transaction


@contextmanager
def write_lock_first() -> Iterator[None]:
    """Make the server's transactions acquire SQLite's write lock when they begin; other databases are unaffected."""
    url = get_current_settings().server.database.connection_url
    if url is None or not url.get_secret_value().startswith("sqlite"):
        yield
        return
    with temporary_database_config(LockingSqlite(connection_url=url.get_secret_value())):
        yield


def guarded_app(hosts: Sequence[str]) -> ASGIApp:
    """Return Prefect's server, UI and background services as an app that refuses requests for other hosts.

    While a database does not answer, clients are told to repeat their requests.
    """
    app = create_app(final=True)
    app.add_middleware(OutageResponse, is_retryable=is_client_retryable_exception)
    # Around the app and not within it: the actions of automations call the app in this process, by a host of their own.
    return TrustedHostMiddleware(app, allowed_hosts=list(hosts), www_redirect=False)


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal is received, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
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
