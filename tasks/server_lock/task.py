"""The exclusive lock of a location that several machines share: a global concurrency limit of the Prefect server."""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL

from tasks.paths import resolved
from tasks.system.locks import locking_with

logger = logging.getLogger("lakevision.locks")

LEASE_SECONDS = 120
"""Time after which the server releases the lock of a killed run, in seconds; it lasts while the run renews it."""


@contextmanager
def server_locks() -> Iterator[None]:
    """Let the current stage lock shared locations on the configured Prefect server; without one, change nothing.

    Other runs do not use the temporary server of a direct call.
    """
    if not PREFECT_API_URL.value():
        yield
        return
    with locking_with(server_lock):
        yield


def limit_name(url: str) -> str:
    """Return the name of the concurrency limit of a folder or URL, the same on every machine with the same path."""
    place = resolved(url)
    # The part for readers; Prefect refuses some characters in names.
    shown = re.sub(r"[^\w.-]", "_", place.rsplit("/", 1)[-1])
    return f"lakevision-{shown}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


@contextmanager
def server_lock(url: str) -> Iterator[None]:
    """Acquire the exclusive lock of a folder or URL on the Prefect server, waiting for other runs.

    Once the lease cannot be renewed, another run may acquire the lock: Prefect ends the block with a CancelledError.

    Raises:
        RuntimeError: The server did not give the lock.
    """
    name = limit_name(url)
    if _is_taken(name):
        logger.info("another run writes to %s: waiting until it ends, or %d s if it was killed", url, LEASE_SECONDS)
    with ExitStack() as held:
        try:
            held.enter_context(concurrency(name, lease_duration=LEASE_SECONDS, strict=True))
        except ConcurrencySlotAcquisitionError as error:
            raise RuntimeError(
                f"the Prefect server '{PREFECT_API_URL.value()}' did not give the lock of '{url}' "
                f"({error.__cause__ or error})"
            ) from error
        yield


def _is_taken(name: str) -> bool:
    """Return whether a run has the lock; create the concurrency limit if it does not exist."""
    with get_client(sync_client=True) as client:
        try:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        except ObjectAlreadyExists:
            return bool(client.read_global_concurrency_limit_by_name(name).active_slots)
    return False
