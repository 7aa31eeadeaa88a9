"""Submission of a deployment to a work pool, with early warnings and cancellation on failure."""

import time
from typing import Any, Literal

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling
from prefect.utilities.urls import url_for

from tasks.cancellation.task import is_being_cancelled
from tasks.errors import SubmittedRunCancelled, WrongInput, parse_user_error
from tasks.pool.settings import PoolSettings, worker_command
from tasks.text.markup import markdown_text

POLL_SECONDS = 2.0
REPORT_AFTER_SECONDS = 20.0
"""Delay after which a submitted run that no worker has picked up is reported."""


def where_to_run(settings: PoolSettings) -> Literal["work_pool", "in_place"]:
    """Return where the work runs: in place if no server is configured, as a temporary server has no workers."""
    if settings.where != "auto":
        return settings.where
    return "work_pool" if PREFECT_API_URL.value() else "in_place"


def read_pool(pool: str, group: str) -> tuple[int | None, int]:
    """Return a pool's concurrency limit, None for no limit, and the number of workers that poll it.

    Args:
        pool: Name of the pool.
        group: Group of settings that names it, for the error message.

    Raises:
        WrongInput: The server does not have the pool.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(pool)
        except ObjectNotFound:
            raise WrongInput(
                f"{group}.work_pool is '{pool}', which the Prefect server does not have: "
                f"create it with 'prefect work-pool create {pool} --type process', or set {group}.where to in_place"
            ) from None
        response = client.request(
            "POST",
            "/work_pools/{work_pool_name}/workers/filter",
            path_params={"work_pool_name": found.name},
            json={"limit": 200},
        )
        return found.concurrency_limit, sum(worker["status"] == "ONLINE" for worker in response.json())


def live_workers(pool: str, group: str) -> int:
    """Return how many workers poll the pool.

    Raises:
        WrongInput: As `read_pool`.
    """
    return read_pool(pool, group)[1]


def check_deployment(settings: PoolSettings, group: str) -> None:
    """Check that the server has the deployment, and that its runs go to the configured pool.

    If they went to another pool, without workers, while the configured one has some, the wait would never end.

    Raises:
        WrongInput: The deployment does not exist, or belongs to another pool.
    """
    with get_client(sync_client=True) as client:
        try:
            runs_on = client.read_deployment_by_name(settings.deployment).work_pool_name
        except ObjectNotFound:
            raise WrongInput(
                f"{group}.deployment is '{settings.deployment}', which the Prefect server does not have: "
                "run 'prefect deploy --all --prefect-file deployments/prefect.yaml', "
                f"or set {group}.where to in_place"
            ) from None
    if runs_on != settings.work_pool:
        where = f"the pool '{runs_on}': give that name, or" if runs_on else "no pool: give"
        raise WrongInput(
            f"{group}.work_pool is '{settings.work_pool}', but the runs of {group}.deployment '{settings.deployment}' "
            f"go to {where} a deployment whose work_pool in deployments/prefect.yaml is '{settings.work_pool}'"
        )


def check_pool(settings: PoolSettings, group: str, what: str) -> None:
    """Check that the deployment and its pool exist, and log a warning if the pool has no worker.

    Raises:
        WrongInput: One of them does not exist; the message has the command that creates it.
    """
    check_deployment(settings, group)
    if not live_workers(settings.work_pool, group):
        # Only a warning, since a worker may start later; the submitted run fails if none does.
        get_run_logger().warning(
            "no worker polls the work pool '%s': start one with '%s' before %s begins",
            settings.work_pool,
            worker_command(settings.work_pool),
            what,
        )


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
        self._waiting_since = time.monotonic()
        self._started: float | None = None
        self._last_poll = -POLL_SECONDS
        self._warned_no_worker = self._logged_busy = self._final = False

    def poll(self) -> bool:
        """Return whether the run has completed; log a warning if no worker picks it up.

        The server is queried at most every POLL_SECONDS, however often this is called.

        Raises:
            SubmittedRunCancelled: A user cancelled it, but not its parent run.
            WrongInput: The parent run was cancelled too, no worker picked it up within `submit_timeout_seconds`, or
                its input was wrong.
            Diverged, TimeLimitExceeded, DiskFull, TrackingUnavailable, RunDeleted, RankStalled: It ended with this
                error.
            TimeoutError: It took longer than `run_timeout_seconds`.
            RuntimeError: It failed or crashed.
        """
        if time.monotonic() - self._last_poll < POLL_SECONDS:
            return False
        self._last_poll = time.monotonic()
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(self._id)
        state = run.state
        assert state is not None
        if state.is_final():
            self._final = True
            self._check_completed(run)
            return True
        if self._started is None and (state.is_scheduled() or state.is_pending()):
            self._wait_for_worker(pending=state.is_pending())
            return False
        self._started = self._started or time.monotonic()
        if time.monotonic() - self._started > self._settings.run_timeout_seconds:
            raise TimeoutError(
                f"the submitted {self._what} took longer than {self._group}.run_timeout_seconds "
                f"{self._settings.run_timeout_seconds}: it was cancelled"
            )
        return False

    def _wait_for_worker(self, *, pending: bool) -> None:
        log, settings = get_run_logger(), self._settings
        waited = time.monotonic() - self._waiting_since
        if waited > REPORT_AFTER_SECONDS and live_workers(settings.work_pool, self._group):
            # The pool is only busy, so the run will start: the timeout is for pools without a worker.
            self._waiting_since = time.monotonic()
            if not self._logged_busy and not pending:  # a pending run is starting already
                self._logged_busy = True
                log.info("the work pool '%s' is busy: waiting for a slot", settings.work_pool)
        elif waited > settings.submit_timeout_seconds:
            raise WrongInput(
                f"no worker of the work pool '{settings.work_pool}' took the {self._what} within "
                f"{self._group}.submit_timeout_seconds {settings.submit_timeout_seconds}: "
                f"start one with '{worker_command(settings.work_pool)}' and run again"
            )
        elif waited > REPORT_AFTER_SECONDS and not self._warned_no_worker:
            self._warned_no_worker = True
            log.warning(
                "no worker polls the work pool '%s': start one with '%s'; waiting %d s more",
                settings.work_pool,
                worker_command(settings.work_pool),
                settings.submit_timeout_seconds - waited,
            )

    def _check_completed(self, run: FlowRun) -> None:
        # The failure of a submitted run does not fail its parent by itself.
        assert run.state is not None
        if error := parse_user_error(message := run.state.message or ""):
            raise self._naming_run(error)
        if run.state.is_cancelled():
            # Prefect's UI cancels submitted runs together with their parent: then this is not a single cancelled run.
            kind = WrongInput if is_being_cancelled() else SubmittedRunCancelled
            raise kind(f"the submitted {self._what} '{run.name}' was cancelled: run again to train")
        if not run.state.is_completed():
            raise self._naming_run(
                RuntimeError(f"the submitted {self._what} '{run.name}' ended as {run.state.name}: {message}")
            )

    def _naming_run(self, error: Exception) -> Exception:
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


def submit(
    settings: PoolSettings, group: str, what: str, parameters: dict[str, Any], *, name: str | None = None
) -> SubmittedRun:
    """Submit the deployment from within a task, and return the submitted run.

    Args:
        settings: Settings with the deployment and the pool.
        group: As `SubmittedRun`.
        what: As `SubmittedRun`.
        parameters: Parameters of the deployed flow, as JSON values.
        name: Name of the flow run; a task submits each name once.

    Raises:
        WrongInput: As `check_deployment`.
    """
    check_deployment(settings, group)
    run = run_deployment(
        settings.deployment,
        parameters=parameters,
        timeout=0,
        flow_run_name=name,
        # A request that is repeated after a lost connection finds the submitted run; a retried task submits a new one.
        idempotency_key=f"{task_run.get_id()}-{task_run.get_run_count()}-{name}",
    )
    assert isinstance(run, FlowRun), "called without an event loop, run_deployment returns the run"
    return SubmittedRun(run, settings, group, what)
