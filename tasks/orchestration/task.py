"""What every Prefect task shares: retries, the run's log, and the states it ends in."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import Task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from prefect.tasks import exponential_backoff
from prefect.transactions import get_transaction
from prefect.utilities.urls import url_for

from tasks.cancellation.task import cancelled_task_run, is_being_cancelled, note_task_run, signal_behind
from tasks.credentials import without_credentials
from tasks.errors import NotRetried, UserError
from tasks.orchestration.failure import ARTIFACT_KEY, state_message, what_went_wrong, without_secrets
from tasks.progress.task import progress_artifacts
from tasks.storage import Storage
from tasks.system.home import make_home
from tasks.text.log_lines import OneLine

logger = logging.getLogger("lakevision.home")

P = ParamSpec("P")
R = TypeVar("R")

SKIPPED = "Skipped"
"""Name of the state of a stage that found its work done."""

DAY_SECONDS = 86_400


async def worth_retrying(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Say whether running again can help: not after wrong input, nor where all the time for it is used up."""
    try:
        await state.aresult()
    except NotRetried:
        return False
    except Exception:  # Anything else may pass: a lost executor, a full disk that was cleaned, a server that restarts.
        return True
    return True


class _RunLogHandler(logging.Handler):
    """Hands the records of plain functions to the Prefect run's logger."""

    def __init__(self, run_logger: Any) -> None:
        super().__init__()
        self._run_logger = run_logger

    def emit(self, record: logging.LogRecord) -> None:
        self._run_logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


@contextmanager
def run_log() -> Iterator[None]:
    """Let everything below the logger `lakevision` reach the log of the current Prefect run."""
    package = logging.getLogger("lakevision")
    handler = _RunLogHandler(get_run_logger())
    handler.addFilter(OneLine())
    level, propagate = package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


def make_homes(*arguments: object) -> None:
    """Create the home folder of each storage among a stage's arguments, and log what was closed to other users."""
    for storage in arguments:
        if isinstance(storage, Storage):
            # A home that cannot be made or read is refused by the stage, which knows what it needs there.
            with suppress(OSError):
                if closed := make_home(Path(storage.home)):
                    logger.warning("%s", closed)


def skipped(value: R, why: str) -> R:
    """Return the value in a completed state named Skipped, so that the UI says that nothing had to be done."""
    # Prefect takes a returned state for the task's own and unpacks its data for the caller.
    return Completed(name=SKIPPED, message=why, data=value)  # type: ignore[return-value]


class Stage(Task[P, R]):
    """A task that may return a state of its own making; its plain call returns or raises what that state holds."""

    if not TYPE_CHECKING:  # To a type checker it is the call of Prefect's task, with all its overloads.

        def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
            """Run the stage in this process."""
            with cancelled_task_run():
                state: State[R] = super().__call__(*args, return_state=True, **kwargs)
            return state if return_state else state.result()

    def with_options(self, **options: Any) -> "Stage[P, R]":
        """Return the stage with other options."""
        changed = super().with_options(**options)
        # Prefect makes a plain task of it, whatever it was made from.
        changed.__class__ = Stage
        return changed  # type: ignore[return-value]


def _ended_as(state: State[Any]) -> Any:
    """Return a state that is not to be found by another run of the same stage as its result."""
    if transaction := get_transaction():
        transaction.write_on_commit = False
    return state


def failed_state(error: Exception) -> State[Any]:
    """Return the state of a run that failed with an error that is explained in one sentence."""
    return Failed(message=state_message(error), data=error)


def explain_failure(error: Exception) -> None:
    """Log the sentence of an error, and publish the artifact `what-went-wrong` of the current flow run."""
    log = get_run_logger()
    if isinstance(error, UserError):
        log.error("%s", without_credentials(str(error)))
    page = url_for("flow-run", obj_id=str(flow_run.get_id()))
    try:
        create_markdown_artifact(
            what_went_wrong(error, page, getattr(error, "__notes__", ())), key=ARTIFACT_KEY, description="Why it failed"
        )
    except Exception as away:  # The error that led here is the one to be told.
        log.warning("the artifact %s was not published: %s", ARTIFACT_KEY, away)


def _run_in_task(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function of a stage; return a state where Prefect's own would hide why it ended.

    Such a state holds the error, so that whoever calls the stage gets that raised.
    """
    note_task_run()
    try:
        with run_log(), progress_artifacts():
            make_homes(*args, *kwargs.values())
            return function(*args, **kwargs)
    except (Exception, TerminationSignal) as error:
        signal = signal_behind(error)
        if signal is not None and is_being_cancelled():
            state: State[Any] = Cancelled(message="The flow run was cancelled.", data=signal)
            return _ended_as(state)  # type: ignore[no-any-return]
        if signal is not None:
            raise signal from None  # Prefect takes it for a crash, and it is one.
        if isinstance(error, UserError):
            return _ended_as(failed_state(error))  # type: ignore[no-any-return]
        if isinstance(error, Exception) and (clean := without_secrets(error)) is not error:
            raise clean from None
        raise


def stage(
    name: str,
    *,
    timeout_seconds: float | None = DAY_SECONDS,
    retries: int = 2,
    cache_key: Callable[[TaskRunContext, dict[str, Any]], str | None] | None = None,
) -> Callable[[Callable[P, R]], Stage[P, R]]:
    """Make a Prefect task: retried with backoff and jitter but not after wrong input, logged, its result kept as JSON.

    Args:
        name: Name of the stage.
        timeout_seconds: After this the task fails; None where the work has a limit of its own.
        retries: How often it is run again after a failure; 0 where that is decided elsewhere.
        cache_key: Names the result by the versions of its inputs; None where it does not exist (any more).
    """

    def decorate(function: Callable[P, R]) -> Stage[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return _run_in_task(function, *args, **kwargs)

        return Stage(
            run,
            name=name,
            retries=retries,
            retry_delay_seconds=exponential_backoff(backoff_factor=5),
            retry_jitter_factor=0.5,
            retry_condition_fn=worth_retrying,
            timeout_seconds=timeout_seconds,
            cache_key_fn=cache_key,
            persist_result=True,
            # JSON, not a pickle: a result may come from another machine.
            result_serializer="json",
        )

    return decorate


def flow_run_tags() -> dict[str, str]:
    """Return the tags by which an MLflow run names the Prefect run it belongs to."""
    found = flow_run.get_id()
    return {"prefect.flow_run_id": str(found)} if found else {}


def run_stage(stage_task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run one stage and return its value, also where it was skipped; a failed one raises what it raised."""
    return _run_stage(stage_task, *args, **kwargs)[0]


def _run_stage(stage_task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, str | None]:
    # A plain call of a task that returned a state returns that state and not its data.
    state: State[R] = stage_task(*args, **kwargs, return_state=True)
    value: R = state.result()
    return value, state.name


class StageLog:
    """Runs stages one after the other, and remembers how long each took and whether it found its work done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.skipped: dict[str, bool] = {}

    def run(self, stage_task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one stage and return its value; a failed one raises what it raised."""
        began = time.perf_counter()
        value, name = _run_stage(stage_task, *args, **kwargs)
        self.seconds[stage_task.name] = round(time.perf_counter() - began, 2)
        self.skipped[stage_task.name] = name in {"Cached", SKIPPED}
        return value
