"""A run that is being cancelled ends as Cancelled, and so do its tasks."""

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

_BEGUN: ContextVar[list[UUID] | None] = ContextVar("task runs begun by the current call of a stage", default=None)


def is_being_cancelled() -> bool:
    """Return whether the Prefect run that this belongs to was cancelled, of which its process hears some seconds later.

    A server that does not answer says of none that it was, and of a run that was deleted nobody can.
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
    """Set the current flow run to Cancelled, if it is being cancelled, once all that it started has ended.

    Its worker does so too, but only after it has imported the flow in another process, to look for hooks.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not is_being_cancelled():
        return
    with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        state: State[None] = Cancelled(message="The flow run was cancelled.")
        client.set_flow_run_state(context.flow_run.id, state)
        context.flow_run.state = state


def signal_behind(error: BaseException) -> TerminationSignal | None:
    """Return the signal that ended this process's work, also where the cleanup after it failed, or None.

    A cancelled run's JVM gets the signal as well, and what is left to say to it is then an error of its own.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, TerminationSignal):
        found = found.__cause__ or found.__context__
    return found


def note_task_run() -> None:
    """Remember the current task run for the call of the stage that it belongs to."""
    begun, context = _BEGUN.get(), TaskRunContext.get()
    if begun is not None and context is not None:
        begun.append(context.task_run.id)


@contextmanager
def cancelled_task_run() -> Iterator[None]:
    """Set the task run of a stage to Cancelled where a signal cancels the flow run outside of the stage's function.

    Prefect takes such a signal for a crash: it waits there, minutes long, before a failed task is tried again.
    """
    begun: list[UUID] = []
    token = _BEGUN.set(begun)
    try:
        yield
    except TerminationSignal:
        if begun and is_being_cancelled():
            _cancel_task_run(begun[-1])
        raise
    finally:
        _BEGUN.reset(token)


def _cancel_task_run(task_run: UUID) -> None:
    state: State[None] = Cancelled(message="The flow run was cancelled.")
    with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        client.set_task_run_state(task_run, state, force=True)
