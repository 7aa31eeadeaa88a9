"""The exclusive lock of a location that several machines share: a global concurrency limit of the Prefect server."""

import functools
import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL

from tasks.paths import resolved
from tasks.system.locks import LeaseCheck, lock_lost, locking_with

logger = logging.getLogger("lakevision.locks")

LEASE_SECONDS = 120
"""Time after which the server releases the lock of a killed run, in seconds; it lasts while the run renews it."""


def server_locks() -> AbstractContextManager[None]:
    """Let the current stage lock shared locations on the configured Prefect server; without one, change nothing.

    Other runs do not use the temporary server of a direct call.
    """
    return locking_with(server_lock) if PREFECT_API_URL.value() else nullcontext()


def limit_name(url: str) -> str:
    """Return the name of the concurrency limit of a folder or URL, the same on every machine with the same path."""
    place = resolved(url)
    # The part for readers; Prefect refuses some characters in names.
    shown = re.sub(r"[^\w.-]", "_", place.rsplit("/", 1)[-1])
    return f"lakevision-{shown}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


@contextmanager
def server_lock(url: str) -> Iterator[LeaseCheck]:
    """Acquire the exclusive lock of a folder or URL on the Prefect server, waiting for other runs.

    Once the lease cannot be renewed, another run may acquire the lock: Prefect ends the block with a CancelledError,
    after attempts that may take longer than the lease. So it yields a check, which renews the lease.

    Raises:
        RuntimeError: The server did not give the lock.
    """
    name = limit_name(url)
    if _is_taken(name):
        logger.info("another run writes to %s: waiting until it ends, or %d s if it was killed", url, LEASE_SECONDS)
    with ExitStack() as held:
        leases = held.enter_context(ConcurrencyContext()).cleanup_lease_ids
        try:
            held.enter_context(concurrency(name, lease_duration=LEASE_SECONDS, strict=True))
        except ConcurrencySlotAcquisitionError as error:
            raise RuntimeError(
                f"the Prefect server '{PREFECT_API_URL.value()}' did not give the lock of '{url}' "
                f"({error.__cause__ or error})"
            ) from error
        (lease,) = leases
        yield functools.partial(_renew, url, lease)


def _renew(url: str, lease: UUID) -> None:
    """Renew a lease: then it lasts for LEASE_SECONDS, longer than a commit.

    Raises:
        LockLost: The server does not answer, or has given the lock to another run.
    """
    try:
        with get_client(sync_client=True) as client:
            client.renew_concurrency_lease(lease_id=lease, lease_duration=LEASE_SECONDS)
    except Exception as error:  # httpx's, or one of Prefect's about its answer
        raise lock_lost(url, f"{type(error).__name__}: {error}") from error


def _is_taken(name: str) -> bool:
    """Return whether a run has the lock; create the concurrency limit if it does not exist."""
    with get_client(sync_client=True) as client:
        try:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        except ObjectAlreadyExists:
            return bool(client.read_global_concurrency_limit_by_name(name).active_slots)
    return False
