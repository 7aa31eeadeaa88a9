"""The end of a flow run's process when the run is cancelled, also where its worker does not see the cancellation."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

POLL_SECONDS = 2.0
"""Interval of the looks at the state of the run; with the ranks' grace it ends within 15 s of its cancellation."""

LOOKS_BEFORE_SIGNAL = 2
"""Looks that must show the cancellation: the worker, if it sees it too, sends its signal after the first."""


@contextmanager
def ended_once() -> Iterator[None]:
    """Let only the first SIGTERM raise TerminationSignal: a second one would interrupt the end of ranks and stages.

    Prefect kills the process some time after its signal, if it has not ended. Threads, which handle no signals, are
    left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise TerminationSignal(signal=number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def watched_cancellation() -> Iterator[None]:
    """Send SIGTERM to this process once the flow run that a worker has started in it is being cancelled.

    The worker does so too, as soon as the server reports the cancellation. After an outage of 10 s it looks for
    cancellations every 10 s only, and after one of some minutes never again (Prefect 3.8).
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or run.work_pool_name is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(run.id, ended, get_run_logger()), name="watch-cancellation", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _watch(run: UUID, ended: threading.Event, log: "logging.Logger | logging.LoggerAdapter[logging.Logger]") -> None:
    num_looks = 0
    # Again with a new client after an outage. Without retries, whose delays would hide the end of the outage.
    while num_looks < LOOKS_BEFORE_SIGNAL and not ended.wait(POLL_SECONDS):
        with (
            suppress(httpx.HTTPError, RuntimeError),  # RuntimeError: of a new client that finds no server
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            while num_looks < LOOKS_BEFORE_SIGNAL and not ended.wait(POLL_SECONDS):
                num_looks = num_looks + 1 if _is_cancelling(client, run) else 0
    if not ended.is_set():
        log.warning("the run was cancelled, and its worker has not ended it: it ends itself")
        os.kill(os.getpid(), signal.SIGTERM)


def _is_cancelling(client: SyncPrefectClient, run: UUID) -> bool:
    try:
        state = client.read_flow_run(run).state
    except ObjectNotFound:  # A deleted run is not a cancelled one.
        return False
    return state is not None and state.is_cancelling()
