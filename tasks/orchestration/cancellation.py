"""The end of a flow run that is being cancelled: of its process, and the state Cancelled of the run and its tasks."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from uuid import UUID

import httpx
from prefect._internal.control_listener import get_intent
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled

POLL_SECONDS = 2.0
"""Interval of the looks at the state of the run; with the ranks' grace it ends within 15 s of its cancellation."""

CONFIRMATIONS = 2
"""Looks that must show the cancellation: the worker, if it sees it too, announces its signal after the first."""

_STARTED: ContextVar[list[UUID] | None] = ContextVar("task runs started by the current call of a stage", default=None)


def is_being_cancelled() -> bool:
    """Return whether the current Prefect run was cancelled; its process gets the signal only seconds later.

    Returns False if the server does not answer, or if the run was deleted.
    """
    found = flow_run.get_id()
    if found is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(found))).state
    except (httpx.HTTPError, ObjectNotFound):
        return False
    return state is not None and (state.is_cancelled() or state.is_cancelling())


def finish_cancellation() -> None:
    """Set the current flow run to Cancelled if it is being cancelled; call this once all its work has ended.

    Its worker does so too, but only after it has imported the flow in another process to look for hooks.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not is_being_cancelled():
        return
    with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        state: State[None] = Cancelled(message="The flow run was cancelled.")
        client.set_flow_run_state(context.flow_run.id, state)
        context.flow_run.state = state


def causing_signal(error: BaseException) -> TerminationSignal | None:
    """Return the signal that caused an error, also where only the cleanup after the signal failed, or None.

    The JVM of a cancelled run gets the signal as well, so later calls to it raise errors of their own.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, TerminationSignal):
        found = found.__cause__ or found.__context__
    return found


def note_task_run() -> None:
    """Record the current task run for the call of its stage."""
    started, context = _STARTED.get(), TaskRunContext.get()
    if started is not None and context is not None:
        started.append(context.task_run.id)


@contextmanager
def cancelled_task_run() -> Iterator[None]:
    """Set the task run of a stage to Cancelled if a signal cancels the flow run outside the stage's function.

    Prefect would report a crash. Such signals come, for instance, in the minutes of delay before a retry.
    """
    started: list[UUID] = []
    token = _STARTED.set(started)
    try:
        yield
    except TerminationSignal:
        if started and is_being_cancelled():
            with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
                client.set_task_run_state(started[-1], Cancelled(message="The flow run was cancelled."), force=True)
        raise
    finally:
        _STARTED.reset(token)


@contextmanager
def watched_cancellation() -> Iterator[None]:
    """Send SIGTERM to this process once the flow run that a worker has started in it is being cancelled.

    The worker does so as soon as the server reports the cancellation, and announces its signal to this process. But
    after an outage of 10 s it looks for cancellations every 10 s only, and after one of some minutes never again
    (Prefect 3.8).
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
    num_confirmations = 0
    # Again with a new client after an outage. Without retries, whose delays would hide the end of the outage.
    while num_confirmations < CONFIRMATIONS and not ended.wait(POLL_SECONDS):
        with (
            suppress(httpx.HTTPError, RuntimeError),  # RuntimeError: of a new client that finds no server
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            while num_confirmations < CONFIRMATIONS and not ended.wait(POLL_SECONDS):
                num_confirmations = num_confirmations + 1 if _is_cancelling(client, run) else 0
    # The end of ranks takes seconds, which a second signal would interrupt.
    if get_intent() is None and not ended.is_set():
        log.warning("the run was cancelled, and its worker has not ended it: it ends itself")
        os.kill(os.getpid(), signal.SIGTERM)


def _is_cancelling(client: SyncPrefectClient, run: UUID) -> bool:
    try:
        state = client.read_flow_run(run).state
    except ObjectNotFound:  # A deleted run is not a cancelled one.
        return False
    return state is not None and state.is_cancelling()
