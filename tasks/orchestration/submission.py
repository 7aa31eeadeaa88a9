"""Submission of a deployment to a work pool: the wait for the submitted run, and its end with its parent."""

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.events.filters import EventFilter
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelling, Crashed
from prefect.utilities.urls import url_for

from tasks.errors import SubmittedRunCancelled, SubmittedRunFailed, SubmittedRunLost, UserError, WrongInput
from tasks.orchestration.cancellation import is_being_cancelled
from tasks.orchestration.failure import noted_error
from tasks.orchestration.pool_settings import PoolSettings
from tasks.orchestration.pools import blocking_runs, check_deployment, gpus_per_run, read_pool
from tasks.orchestration.wait import Outage, RunWait
from tasks.text.markup import markdown_text

POLL_SECONDS = 2.0

HEARTBEAT = "prefect.flow-run.heartbeat"
"""Event that a flow run sends at regular intervals while its process runs."""

HEARTBEAT_POLL_SECONDS = 15.0
"""Interval of the requests for the newest heartbeat; the interval of heartbeats is 30 s or more."""

END_SECONDS = 60.0
"""Time in which the worker of a lost run may end it, if both are alive after all, before it is marked as crashed."""

SCHEDULER_TAGS = frozenset({"auto-scheduled"})
"""Tags of a run that Prefect started by a schedule, which do not hold for the runs that it submits."""

REFUSED = (httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY)
"""Status codes of the server for parameters and job variables that do not fit their schemas."""

R = TypeVar("R")


def is_outage(error: BaseException) -> bool:
    """Return whether an error of Prefect's client is that of a server that does not answer, or not for now."""
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    # A new client reports a server that it cannot reach as a RuntimeError with the cause.
    cause = error.__cause__
    return isinstance(error, httpx.TransportError) or (cause is not None and is_outage(cause))


class SubmittedRun:
    """A flow run that was submitted to a work pool."""

    def __init__(self, run: FlowRun, settings: PoolSettings, group: str, what: str) -> None:
        """Start the timeouts of a run that was submitted just now.

        Args:
            run: The flow run.
            settings: Settings with the pool and the timeouts.
            group: Name of the group of settings, for messages: distributed, tune.
            what: Name of the work, for messages: training, trial.
        """
        self.name = run.name
        self._id = run.id
        self._settings = settings
        self._group = group
        self._what = what
        self._wait = RunWait(settings, group, what, run.name)
        self._outage = Outage(f"the submitted {what} '{run.name}' continues", _outage_limit(settings, group))
        self._last_poll = -POLL_SECONDS
        self._last_look = -HEARTBEAT_POLL_SECONDS
        self._heartbeat: object = None
        self._lost: tuple[SubmittedRunLost, float] | None = None
        self._final = False

    def poll(self) -> bool:
        """Return whether the run has completed; log a warning if no worker picks it up, or if the server is away.

        The server is queried at most every POLL_SECONDS, however often this is called.

        Raises:
            SubmittedRunCancelled: A user cancelled or deleted it, but not its parent run.
            WrongInput: The parent run was cancelled too, no worker picked it up within `submit_timeout_seconds`, or
                its input was wrong.
            Diverged, TimeLimitExceeded, DiskFull, TrackingUnavailable, RunDeleted: It ended with this error, or took
                longer than `run_timeout_seconds`.
            SubmittedRunLost: It crashed, has not begun within `start_timeout_seconds`, or has sent no heartbeat for
                `heartbeat_timeout_seconds`.
            SubmittedRunFailed: It failed.
        """
        if time.monotonic() - self._last_poll < POLL_SECONDS:
            return False
        self._last_poll = time.monotonic()
        try:
            with get_client(sync_client=True) as client:
                has_completed = self._look(client)
        except ObjectNotFound:
            self._final = True
            raise SubmittedRunCancelled(
                f"the submitted {self._what} '{self.name}' was deleted", way_out="run again to train"
            ) from None
        except (httpx.TransportError, PrefectHTTPStatusError, RuntimeError) as error:
            if not is_outage(error):
                raise
            self._outage.note(error)
            self._wait.check_time_limit()
            return False
        return has_completed

    def _look(self, client: SyncPrefectClient) -> bool:
        run = client.read_flow_run(self._id)
        state = run.state
        assert state is not None
        if self._outage.end():
            self._wait.restart()
        if state.is_final():
            self._final = True
            if self._lost is not None and not state.is_completed():
                raise self._naming_run(self._lost[0])
            self._check_completed(run)
            return True
        if self._lost is not None:
            self._end_lost(client, *self._lost)
            return False
        try:
            if state.is_scheduled():
                if self._wait.is_worth_reporting():
                    pool = self._settings.work_pool
                    _limit, num_workers = read_pool(pool, self._group)
                    self._wait.scheduled(num_workers, partial(blocking_runs, client, pool))
            elif state.is_pending():
                self._wait.pending()
            else:
                self._wait.running(self._newest_heartbeat(client))
        except SubmittedRunLost as lost:
            # By the worker if that is alive after all: a run that is only marked as crashed would continue.
            client.set_flow_run_state(self._id, Cancelling())
            self._lost = lost, time.monotonic()
        return False

    def _newest_heartbeat(self, client: SyncPrefectClient) -> object:
        """Return the id of the newest heartbeat of the run, or None."""
        if time.monotonic() - self._last_look >= HEARTBEAT_POLL_SECONDS:
            self._last_look = time.monotonic()
            wanted = {"event": {"name": [HEARTBEAT]}, "resource": {"id": [f"prefect.flow-run.{self._id}"]}}
            found = client.read_events(EventFilter.model_validate(wanted), limit=1).events
            self._heartbeat = found[0].id if found else self._heartbeat
        return self._heartbeat

    def _end_lost(self, client: SyncPrefectClient, lost: SubmittedRunLost, since: float) -> None:
        """Mark a lost run as crashed, which frees its slot, if its worker has not ended it."""
        if time.monotonic() - since > END_SECONDS:
            client.set_flow_run_state(self._id, Crashed(message=str(lost)), force=True)
            self._final = True
            raise self._naming_run(lost)

    def _check_completed(self, run: FlowRun) -> None:
        # The failure of a submitted run does not fail its parent by itself.
        state = run.state
        assert state is not None
        ended = f"the submitted {self._what} '{run.name}' ended as {state.name}: {state.message or 'without a message'}"
        if error := noted_error(run.labels, state.message or ""):
            error.was_retried = True  # by the stages of the submitted run
            raise self._naming_run(error)
        if state.is_cancelled():
            # Prefect's UI cancels submitted runs together with their parent: then this is not a single cancelled run.
            kind = WrongInput if is_being_cancelled() else SubmittedRunCancelled
            raise kind(f"the submitted {self._what} '{run.name}' was cancelled", way_out="run again to train")
        if state.is_crashed():
            advice = "run again, training resumes from its checkpoint"
            raise self._naming_run(SubmittedRunLost.complete(f"{ended}; {advice}", way_out=advice))
        if not state.is_completed():
            advice = "see its log"
            raise self._naming_run(SubmittedRunFailed.complete(f"{ended}; {advice}", way_out=advice))

    def _naming_run(self, error: UserError) -> UserError:
        """Return the error with a note that links to the submitted run, for the artifact of the parent run."""
        page, name = url_for("flow-run", obj_id=str(self._id)), markdown_text(self.name)
        error.add_note(f"Submitted {self._what}: {f'[{name}]({page})' if page else name}")
        return error

    def cancel(self) -> None:
        """Cancel the run if it has not ended; a failure is logged, not raised, since another error led here."""
        if self._final:
            return
        try:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(self._id, Cancelling())
        except Exception as error:
            get_run_logger().warning("the submitted %s '%s' could not be cancelled: %s", self._what, self.name, error)

    def join(self) -> None:
        """Return at once: the worker ends the processes of the run."""

    def wait(self) -> None:
        """Wait until the run has completed; cancel it if the wait is interrupted or fails.

        Raises:
            Exception: As `poll`.
        """
        try:
            while not self.poll():
                time.sleep(POLL_SECONDS)
        except BaseException:
            # Cancelled, timed out or failed: the submitted run ends with its parent.
            self.cancel()
            raise


def _outage_limit(settings: PoolSettings, group: str) -> tuple[str, int]:
    """Return the limit of an outage: the time that the run itself may take, also before it has begun."""
    return f"{group}.run_timeout_seconds", settings.run_timeout_seconds


def _answered(request: Callable[[], R], what: str, limit: tuple[str, int]) -> R:
    """Return the result of a request, which is repeated until the server answers it.

    Raises:
        TimeLimitExceeded: The server did not answer within the limit.
    """
    outage = Outage(f"the {what} is submitted then", limit)
    while True:
        try:
            result = request()
        except (httpx.TransportError, PrefectHTTPStatusError, RuntimeError) as error:
            if not is_outage(error):
                raise
            outage.note(error)
            time.sleep(POLL_SECONDS)
        else:
            outage.end()
            return result


def _submission_key(settings: PoolSettings, parameters: dict[str, Any], name: str | None) -> str:
    """Return the same key for each attempt of the current flow run to submit the same work."""
    submitter = flow_run.get_id() or task_run.get_id()
    given = json.dumps([str(submitter), settings.deployment, name, parameters], sort_keys=True, default=str)
    return hashlib.sha256(given.encode()).hexdigest()[:32]


def _job_variables(settings: PoolSettings, gpus: int | None) -> dict[str, Any]:
    """Return the job variables of a run, with the GPUs that it needs if its pool gives a run GPUs, but too few.

    A number that the user has chosen stays, and a pool without GPUs gets no other run.
    """
    variables = settings.job_variables
    if gpus is None or "gpus" in variables or not 0 < (gpus_per_run(settings) or 0) < gpus:
        return variables
    return variables | {"gpus": gpus}


def _find_or_create(settings: PoolSettings, group: str, **options: Any) -> FlowRun:
    tags = sorted(set(flow_run.get_tags()) - SCHEDULER_TAGS)
    try:
        run = run_deployment(settings.deployment, timeout=0, tags=tags, **options)
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in REFUSED:
            raise
        raise WrongInput(
            f"{group}.job_variables or other settings do not fit {group}.deployment '{settings.deployment}' "
            f"({error.response.json().get('detail')})",
            setting=f"{group}.job_variables",
            way_out="correct them, or the base job template of the pool",
        ) from None
    assert isinstance(run, FlowRun), "called without an event loop, run_deployment returns the run"
    return run


def submit(
    settings: PoolSettings,
    group: str,
    what: str,
    parameters: dict[str, Any],
    *,
    name: str | None = None,
    gpus: int | None = None,
    has_result: Callable[[], bool] = lambda: True,
) -> SubmittedRun:
    """Submit the deployment from within a task, and return the submitted run.

    If an earlier attempt of this flow run has submitted the same work, and that run is alive, or has completed and its
    result is still there, it is taken.

    Args:
        settings: Settings with the deployment and the pool.
        group: As `SubmittedRun`.
        what: As `SubmittedRun`.
        parameters: Parameters of the deployed flow, as JSON values.
        name: Name of the flow run; a task submits each name once.
        gpus: Number of GPUs that the run can use; None if it asks for none.
        has_result: Returns whether the result of a completed run is there: its MLflow run may have been deleted.

    Raises:
        WrongInput: As `check_deployment`, or the server refuses the settings.
        TimeLimitExceeded: The server did not answer within `run_timeout_seconds`.
    """
    limit = _outage_limit(settings, group)
    _answered(lambda: check_deployment(settings, group), what, limit)
    variables = _answered(partial(_job_variables, settings, gpus), what, limit) or None
    key = _submission_key(settings, parameters, name)
    for attempt in count():
        # The server returns the run that it has for a key, also after a lost connection.
        create = partial(_find_or_create, settings, group, idempotency_key=f"{key}-{attempt}")
        run = _answered(
            partial(create, parameters=parameters, flow_run_name=name, job_variables=variables), what, limit
        )
        state = run.state
        is_alive = state is None or not (state.is_final() or state.is_cancelling())
        if is_alive or (state is not None and state.is_completed() and has_result()):
            return SubmittedRun(run, settings, group, what)
    raise AssertionError("the count of attempts does not end")
