"""The final state Cancelled of a flow run that is being cancelled, and of its tasks."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

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
            _cancel_task_run(started[-1])
        raise
    finally:
        _STARTED.reset(token)


def _cancel_task_run(task_run: UUID) -> None:
    state: State[None] = Cancelled(message="The flow run was cancelled.")
    with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        client.set_task_run_state(task_run, state, force=True)
