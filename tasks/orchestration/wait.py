"""The bounds of the wait for a submitted run: no worker, start, heartbeat or server, and its own time limit."""

import logging
import time
from collections.abc import Callable
from typing import Literal

from tasks.errors import SubmittedRunLost, TimeLimitExceeded, WrongInput
from tasks.orchestration.pool_settings import PoolSettings, worker_command

REPORT_AFTER_SECONDS = 20.0
"""Delay after which a submitted run that no worker has picked up is reported."""

BLOCKED_AFTER_SECONDS = 60.0
"""Delay of the first warning that runs which wait themselves hold the pool's slots; it doubles with each warning."""

Phase = Literal["scheduled", "pending", "running"]
"""What a submitted run does: it waits for a worker or a slot, a worker starts its process, or its process runs."""

logger = logging.getLogger("lakevision.pool")


class RunWait:
    """The wait for one submitted run, as far as its clocks decide when it ends."""

    def __init__(
        self, settings: PoolSettings, group: str, what: str, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clocks of a run that was submitted just now.

        Args:
            settings: Settings with the pool and the timeouts.
            group: Name of the group of settings, for messages: distributed, tune.
            what: Name of the work, for messages: training, trial.
            name: Name of the run.
            clock: Returns the time in seconds; it stands still while the machine sleeps.
        """
        self._settings = settings
        self._group = group
        self._what = what
        self._name = name
        self._clock = clock
        self._phase: Phase = "scheduled"
        self._since = self._worker_since = clock()
        self._started: float | None = None
        self._heartbeat: object = None
        self._warned_no_worker = self._logged_busy = False
        self._warn_blocked_at = BLOCKED_AFTER_SECONDS

    def restart(self) -> None:
        """Restart the clocks of the current phase after an outage of the server, during which nothing was reported."""
        self._since = self._worker_since = self._clock()

    def _enter(self, phase: Phase) -> float:
        """Enter a phase, and return the seconds since it began."""
        if phase != self._phase:
            self._phase = phase
            self._since = self._worker_since = self._clock()
        return self._clock() - self._since

    def is_worth_reporting(self) -> bool:
        """Return whether the run has waited for a worker long enough that it is looked for."""
        return self._enter("scheduled") > REPORT_AFTER_SECONDS

    def scheduled(self, num_workers: int, find_blocking: Callable[[], list[str]]) -> None:
        """Note that the run waits for a worker or a slot.

        Args:
            num_workers: Number of workers that poll the pool.
            find_blocking: Returns the names of the runs that hold all slots of the pool and wait for runs on it.

        Raises:
            WrongInput: No worker polled the pool within `submit_timeout_seconds`.
        """
        age, settings = self._enter("scheduled"), self._settings
        if num_workers:
            # The pool is only busy, so the run will start: the timeout is for pools without a worker.
            self._worker_since = self._clock()
            self._note_busy(age, find_blocking)
            return
        waited = self._clock() - self._worker_since
        if waited > settings.submit_timeout_seconds:
            raise WrongInput(
                f"no worker of the work pool '{settings.work_pool}' took the {self._what} within "
                f"{self._group}.submit_timeout_seconds {settings.submit_timeout_seconds}",
                setting=f"{self._group}.submit_timeout_seconds",
                way_out=f"start one with '{worker_command(settings.work_pool)}' and run again",
            )
        if waited > REPORT_AFTER_SECONDS and not self._warned_no_worker:
            self._warned_no_worker = True
            logger.warning(
                "no worker polls the work pool '%s': start one with '%s'; waiting %d s more",
                settings.work_pool,
                worker_command(settings.work_pool),
                settings.submit_timeout_seconds - waited,
            )

    def _note_busy(self, waited: float, find_blocking: Callable[[], list[str]]) -> None:
        if not self._logged_busy:
            self._logged_busy = True
            logger.info("the work pool '%s' is busy: waiting for a slot", self._settings.work_pool)
        if waited <= self._warn_blocked_at:
            return
        blocking = find_blocking()
        self._warn_blocked_at = 2 * waited if blocking else waited + BLOCKED_AFTER_SECONDS
        if blocking:
            logger.warning(
                "the submitted %s '%s' has waited %d s for a slot of the work pool '%s'; all slots are held by runs "
                "that wait for runs on it: %s. Raise the limit of the pool, or cancel one of them",
                self._what,
                self._name,
                waited,
                self._settings.work_pool,
                ", ".join(blocking),
            )

    def pending(self) -> None:
        """Note that a worker has taken the run, whose process has not begun.

        Raises:
            SubmittedRunLost: It has not begun within `start_timeout_seconds`.
        """
        if self._enter("pending") > self._settings.start_timeout_seconds:
            raise SubmittedRunLost(
                f"a worker of the work pool '{self._settings.work_pool}' took the {self._what} '{self._name}', which "
                f"has not begun within {self._group}.start_timeout_seconds {self._settings.start_timeout_seconds}",
                setting=f"{self._group}.start_timeout_seconds",
                way_out="its worker is gone, or has no machine for it; see the log of the worker, and run again",
            )

    def running(self, heartbeat: object) -> None:
        """Note that the process of the run has begun.

        Args:
            heartbeat: Identity of the newest heartbeat of the run, or None if there is none.

        Raises:
            SubmittedRunLost: It has not sent another heartbeat within `heartbeat_timeout_seconds`.
            TimeLimitExceeded: As `check_time_limit`.
        """
        self._enter("running")
        if heartbeat != self._heartbeat:
            self._heartbeat, self._since = heartbeat, self._clock()
        if self._started is None:
            self._started = self._clock()
        self.check_time_limit()
        # A run that never sent one has heartbeats turned off: only its time limit ends the wait.
        silent = self._clock() - self._since
        if heartbeat is not None and silent > self._settings.heartbeat_timeout_seconds:
            raise SubmittedRunLost(
                f"the submitted {self._what} '{self._name}' has sent no heartbeat for {silent:.0f} s "
                f"({self._group}.heartbeat_timeout_seconds is {self._settings.heartbeat_timeout_seconds})",
                setting=f"{self._group}.heartbeat_timeout_seconds",
                way_out="its process, worker or machine is gone; run again, training resumes from its checkpoint",
            )

    def check_time_limit(self) -> None:
        """Check the duration of the run, which counts from its first start, also while no server answers.

        Raises:
            TimeLimitExceeded: It took longer than `run_timeout_seconds`.
        """
        if self._started is not None and self._clock() - self._started > self._settings.run_timeout_seconds:
            raise TimeLimitExceeded(
                f"the submitted {self._what} '{self._name}' took longer than {self._group}.run_timeout_seconds "
                f"{self._settings.run_timeout_seconds}",
                setting=f"{self._group}.run_timeout_seconds",
                way_out="it was cancelled; raise the limit and run again",
            )


class Outage:
    """The periods in which the server does not answer: one warning for each, and one line when it is over."""

    def __init__(self, what: str, limit: tuple[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """Start without an outage.

        Args:
            what: What continues meanwhile, for the warning.
            limit: Name of the setting that limits the duration of an outage, and its value in seconds.
            clock: Returns the time in seconds.
        """
        self._what = what
        self._limit = limit
        self._clock = clock
        self._since: float | None = None

    def note(self, error: Exception) -> None:
        """Note a request that was not answered.

        Raises:
            TimeLimitExceeded: The outage has lasted longer than its limit.
        """
        if self._since is not None:
            setting, seconds = self._limit
            if (duration := self._clock() - self._since) > seconds:
                raise TimeLimitExceeded(
                    f"the Prefect server has not answered for {duration:.0f} s ({error}), longer than {setting} "
                    f"{seconds}",
                    setting=setting,
                    way_out="start it, and run again",
                )
            return
        self._since = self._clock()
        logger.warning("the Prefect server does not answer (%s): waiting until it does; %s", error, self._what)

    def end(self) -> bool:
        """Note a request that was answered, and return whether an outage ends with it."""
        if self._since is None:
            return False
        logger.warning("the Prefect server answers again, after %.0f s", self._clock() - self._since)
        self._since = None
        return True
