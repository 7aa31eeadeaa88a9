"""The decorator of all Prefect tasks: retries, the run's log, and final states."""

import inspect
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from httpx import HTTPError
from prefect import Task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from prefect.task_engine import TaskRunTimeoutError
from prefect.tasks import exponential_backoff
from prefect.transactions import get_transaction
from prefect.utilities.urls import url_for

from tasks.credentials import without_credentials
from tasks.environment import mlflow_page
from tasks.errors import UserError, is_retried
from tasks.orchestration.cancellation import cancelled_task_run, causing_signal, is_being_cancelled, note_task_run
from tasks.orchestration.failure import ARTIFACT_KEY, error_labels, failure_markdown, state_message, without_secrets
from tasks.orchestration.pools import own_pool
from tasks.orchestration.progress_artifacts import progress_artifacts
from tasks.orchestration.server_lock import server_locks
from tasks.storage import Storage
from tasks.system.home import make_home
from tasks.text.log_lines import SingleLineFilter

logger = logging.getLogger("lakevision.home")

P = ParamSpec("P")
R = TypeVar("R")

HOST_LABEL = "lakevision.host"
"""Label of a flow run with the name of the machine that runs it."""

SKIPPED = "Skipped"
"""Name of the state of a stage whose work was already done."""


async def worth_retrying(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a failed stage is retried, by its error; a retry after its time limit would take as long again."""
    try:
        await state.aresult()
    except TaskRunTimeoutError:
        return False
    except Exception as error:
        return is_retried(error)
    return True


class _RunLogHandler(logging.Handler):
    """Handler that passes records of the logger `lakevision` to the logger of one task run.

    A record of another task run in this process is left out; one from a thread without a task run goes to all of them.

    Attributes:
        outside: Level and propagation of the logger outside runs.
    """

    def __init__(self, outside: tuple[int, bool]) -> None:
        super().__init__()
        self.outside = outside
        own = _current_task_run()
        self._run_logger = get_run_logger()
        self.addFilter(SingleLineFilter())
        self.addFilter(lambda _: _current_task_run() in {None, own})

    def emit(self, record: logging.LogRecord) -> None:
        self._run_logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


_log_lock = threading.Lock()


def _current_task_run() -> UUID | None:
    """Return the id of the task run of this thread, or None."""
    context = TaskRunContext.get()
    return context.task_run.id if context is not None else None


@contextmanager
def run_log() -> Iterator[None]:
    """Send the records of all loggers below `lakevision` to the log of the current task run."""
    package = logging.getLogger("lakevision")

    def others() -> list[_RunLogHandler]:
        return [handler for handler in package.handlers if isinstance(handler, _RunLogHandler)]

    with _log_lock:
        handler = _RunLogHandler(next((run.outside for run in others()), (package.level, package.propagate)))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
    try:
        yield
    finally:
        with _log_lock:
            package.removeHandler(handler)
            # Flows in other threads still log.
            if not others():
                level, package.propagate = handler.outside
                package.setLevel(level)


def make_homes(*arguments: object) -> None:
    """Create the home folder of each storage among a stage's arguments, and log if access to it was restricted."""
    for storage in arguments:
        if isinstance(storage, Storage):
            # The stage itself refuses a home that cannot be created or read, as it knows what it needs there.
            with suppress(OSError):
                if closed := make_home(Path(storage.home)):
                    logger.warning("%s", closed)


def skipped(value: R, why: str) -> R:
    """Return the value in a completed state named Skipped, which the UI shows with the reason."""
    # Prefect uses a returned state as the task's own, and unpacks its data for the caller.
    return Completed(name=SKIPPED, message=why, data=value)  # type: ignore[return-value]  # Prefect unpacks a returned state


def publish_mlflow_page(storage: Storage, location: str, key: str, text: str, about: str) -> None:
    """Create the artifact with a link to a page of MLflow's UI, unless no UI shows the database.

    Args:
        storage: Storage with the tracking URI.
        location: Path of the page in the UI.
        key: Key of the artifact.
        text: Text of the link.
        about: Description of the artifact, in Markdown.
    """
    page = mlflow_page(storage.tracking, location)
    if page is not None:
        create_link_artifact(link=page, link_text=text, key=key, description=about)


class Stage(Task[P, R]):
    """A task that may return a state; a direct call returns the value, or raises the error, that the state holds.

    Attributes:
        timeout_in: Name of the parameter whose setting `timeout_seconds` is the time limit of the task, or None.
    """

    timeout_in: str | None = None

    if not TYPE_CHECKING:  # A type checker sees the call of Prefect's task, with all its overloads.

        def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
            """Run the stage in this process."""
            if self.timeout_in is not None:
                given = inspect.signature(self.fn).bind(*args, **kwargs).arguments[self.timeout_in]
                limited = self.with_options(timeout_seconds=given.timeout_seconds)
                limited.timeout_in = None
                return limited(*args, return_state=return_state, **kwargs)
            with cancelled_task_run():
                state: State[R] = super().__call__(*args, return_state=True, **kwargs)
            return state if return_state else state.result()

    def with_options(self, **options: Any) -> "Stage[P, R]":
        """Return a copy of the stage with the given options."""
        changed = super().with_options(**options)
        # Prefect creates a `Task`, whatever the class of the original.
        changed.__class__ = Stage
        changed.timeout_in = self.timeout_in  # type: ignore[attr-defined]  # as above
        return changed  # type: ignore[return-value]  # with_options keeps the class


def _not_cached(state: State[Any]) -> Any:
    """Return the state, which is not stored as the cached result of the stage."""
    if transaction := get_transaction():
        transaction.write_on_commit = False
    return state


def failed_state(error: Exception) -> State[Any]:
    """Return the failed state of a run, with the message of its error."""
    return Failed(message=state_message(error), data=error)


def explain_failure(error: Exception) -> None:
    """Log a user error and label the current flow run with it, and publish the artifact `what-went-wrong`."""
    log = get_run_logger()
    if isinstance(error, UserError):
        log.error("%s", without_credentials(str(error)))
        _label_run(error_labels(error))
    page = url_for("flow-run", obj_id=str(flow_run.get_id()))
    try:
        create_markdown_artifact(
            failure_markdown(error, page, getattr(error, "__notes__", ())),
            key=ARTIFACT_KEY,
            description="Why it failed",
        )
    except Exception as failure:  # Not raised, since it would hide the error that led here.
        log.warning("the artifact %s was not published: %s", ARTIFACT_KEY, failure)


def _run_in_task(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function of a stage; return a state if Prefect's own state would hide why it ended.

    That state holds the error, so that it is raised for the caller of the stage.
    """
    note_task_run()
    try:
        with run_log(), progress_artifacts(), server_locks():
            make_homes(*args, *kwargs.values())
            return function(*args, **kwargs)
    except (Exception, TerminationSignal) as error:
        signal = causing_signal(error)
        if signal is not None and is_being_cancelled():
            return _not_cached(Cancelled(message="The flow run was cancelled.", data=signal))  # type: ignore[no-any-return]  # Prefect's state helpers return Any
        if signal is not None:
            raise signal from None  # Prefect reports a crash, which is correct here.
        if isinstance(error, UserError):
            return _not_cached(failed_state(error))  # type: ignore[no-any-return]  # Prefect's state helpers return Any
        if isinstance(error, Exception) and (clean := without_secrets(error)) is not error:
            raise clean from None
        raise


def stage(
    name: str,
    *,
    timeout_seconds: float | None = None,
    timeout_in: str | None = None,
    retries: int = 2,
    cache_key: Callable[[TaskRunContext, dict[str, Any]], str | None] | None = None,
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Return a decorator that makes a Prefect task with retries, the run's log, and results stored as JSON.

    Retries have exponential backoff and jitter; `tasks.errors.is_retried` decides which errors are retried.

    Args:
        name: Name of the stage.
        timeout_seconds: Time limit of the task; None if the work or a setting has it.
        timeout_in: Name of the parameter whose setting `timeout_seconds` is the time limit of the task.
        retries: Number of retries after a failure; 0 if they are decided elsewhere.
        cache_key: Returns the cache key of the result, from the versions of its inputs, or None if the cached result
            cannot be used.
    """

    def decorate(function: Callable[P, R]) -> Stage[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return _run_in_task(function, *args, **kwargs)

        created = Stage(
            run,
            name=name,
            retries=retries,
            retry_delay_seconds=exponential_backoff(backoff_factor=5),
            retry_jitter_factor=0.5,
            retry_condition_fn=worth_retrying,
            timeout_seconds=timeout_seconds,
            cache_key_fn=cache_key,
            persist_result=True,
            # JSON, not pickle: a result may come from another machine.
            result_serializer="json",
        )
        created.timeout_in = timeout_in
        return created

    return decorate


def _label_run(labels: dict[str, bool | int | float | str]) -> None:
    """Add labels to the current flow run; a failure is only logged, since the run itself can do without."""
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(UUID(str(flow_run.get_id())), labels)
    except (HTTPError, RuntimeError) as error:  # RuntimeError: of a new client that finds no server
        get_run_logger().warning("the run has no label %s: %s", ", ".join(labels), error)


def note_host() -> None:
    """Label the current flow run with this machine's name if a worker runs it, for the next worker here."""
    if own_pool() is not None:
        _label_run({HOST_LABEL: socket.gethostname()})


def flow_run_tags() -> dict[str, str]:
    """Return the tag by which an MLflow run names its Prefect flow run, if there is one."""
    found = flow_run.get_id()
    return {"prefect.flow_run_id": str(found)} if found else {}


def run_stage(stage_task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run one stage as `StageLog.run`, without a record."""
    return StageLog().run(stage_task, *args, **kwargs)


class StageLog:
    """Record of the stages that it runs: how long each took, and whether its work was already done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.skipped: dict[str, bool] = {}

    def run(self, stage_task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one stage and return its value, also if it was skipped; raise the error of a failed stage."""
        began = time.perf_counter()
        # Without `return_state`, a task that returned a state would return that state and not its data.
        state: State[R] = stage_task(*args, **kwargs, return_state=True)
        value: R = state.result()
        self.seconds[stage_task.name] = round(time.perf_counter() - began, 2)
        self.skipped[stage_task.name] = state.name in {"Cached", SKIPPED}
        return value
