"""The search loop: starts, polls and cancels trials, and collects their results, without Prefect."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import optuna

from tasks.cache.manifest import open_cache
from tasks.config.recipe import monitored
from tasks.config.train import TrainConfig
from tasks.config.tune import TuneConfig, with_values
from tasks.errors import AccessDenied, SubmittedRunCancelled, WrongInput
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.tracking.searches import parent_run, trial_tags
from tasks.train.spec import TrainingSpec
from tasks.tune.space import distributions, fit_to_data, study_name, trial_config
from tasks.tune.study import (
    best_trial,
    counted_trials,
    lock_study,
    mark_cancelled,
    next_trial,
    open_study,
    requeue_lost_trials,
    trial_rows,
)
from tasks.tune.trial import fail_trial, run_trial

logger = logging.getLogger("lakevision.tune")

POLL_SECONDS = 0.2
"""Interval between two polls of the running trials."""


class RunningTrial(Protocol):
    """A started trial, in this process or on a work pool."""

    def poll(self) -> bool:
        """Return whether it has ended, completed or pruned; raise its error if it failed."""

    def cancel(self) -> None:
        """Request its cancellation, without waiting."""

    def join(self) -> None:
        """Wait until it has ended in this process."""


@dataclass(frozen=True)
class TrialStart:
    """Arguments of one trial, which may run on another machine."""

    spec: TrainingSpec
    study: str
    number: int
    tune: TuneConfig
    parent_run_id: str


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    best: TrainConfig
    """Settings of the best trial, with the full number of epochs."""
    value: float
    """Value of `train.monitor` of the best trial."""
    rows: list[dict[str, Any]]
    """As `trial_rows`."""
    run_id: str
    """Parent MLflow run of the trials' runs."""


class TrialThread:
    """A trial whose launcher runs in a thread of this process; its ranks are subprocesses."""

    def __init__(self, start: TrialStart, num_slots: int) -> None:
        """Start a trial, which takes its share of the cores of `num_slots` concurrent ones."""
        self._start = replace(start, spec=start.spec.model_copy(update={"num_slots": num_slots}))
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"trial-{start.number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_trial(self._start.spec, self._start.study, self._start.number, self._start.tune, self._stop)
        except BaseException as error:  # Raised again by `poll`, in the thread of the search.
            self._error = error

    def poll(self) -> bool:
        """Return whether it has ended.

        Raises:
            WrongInput, RankFailed, TimeoutError: As `run_trial`.
        """
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """Request the shutdown of its ranks."""
        self._stop.set()

    def join(self) -> None:
        """Wait until its ranks have exited."""
        self._thread.join()


def run_trials(
    study: optuna.Study,
    tune: TuneConfig,
    start: Callable[[int, dict[str, Any]], RunningTrial],
    poll_seconds: float = POLL_SECONDS,
    on_cancelled: Callable[[int], None] = lambda _number: None,
) -> None:
    """Start trials, `tune.parallel` at a time, until there are `tune.num_trials` or `tune.timeout_seconds` have passed.

    A trial that fails (out of memory, a lost worker) has no value. The search continues, and its next run retries the
    trial. A trial that a user cancelled has no value either, and is not retried.

    Args:
        study: The study, locked by the caller.
        tune: Number of trials, number of concurrent trials, and time limit.
        start: Starts a trial with its number and values; the trial reports its result to the study.
        poll_seconds: Interval between two polls of the running trials.
        on_cancelled: Called with the number of a trial that a user cancelled.

    Raises:
        WrongInput: A trial's input is invalid; all running trials are cancelled.
    """
    space = distributions(tune.space)
    deadline = None if tune.timeout_seconds is None else time.monotonic() + tune.timeout_seconds
    running: dict[int, RunningTrial] = {}
    try:
        while True:
            while len(running) < tune.parallel and (deadline is None or time.monotonic() < deadline):
                trial = next_trial(study, space, tune)
                if trial is None:
                    break
                logger.info("trial %d of %d: %s", trial.number, tune.num_trials, trial.params)
                running[trial.number] = start(trial.number, trial.params)
            if not running:
                return
            for number in [
                number for number, trial in running.items() if _has_ended(study, number, trial, on_cancelled)
            ]:
                del running[number]
            time.sleep(poll_seconds)
    except BaseException:
        # All are cancelled before the first join: each may take half a minute, the whole of Prefect's grace period.
        for remaining in running.values():
            remaining.cancel()
        for remaining in running.values():
            remaining.join()
        raise


def _has_ended(study: optuna.Study, number: int, trial: RunningTrial, on_cancelled: Callable[[int], None]) -> bool:
    try:
        if not trial.poll():
            return False
    except SubmittedRunCancelled as error:
        logger.warning("trial %d is not retried: %s", number, error)
        mark_cancelled(study, number)
        fail_trial(study, number, str(error))
        on_cancelled(number)
    except (WrongInput, AccessDenied):
        raise  # A retry would raise it again.
    except Exception as error:
        logger.warning("trial %d failed: %s", number, error)
        trial.cancel()
        trial.join()
        fail_trial(study, number, f"{type(error).__name__}: {error}")
    return True


def search_parameters(
    train: TrainConfig,
    tune: TuneConfig,
    cache: CacheRef,
    storage: Storage,
    start: Callable[[TrialStart], RunningTrial],
    tags: dict[str, str],
) -> SearchResult:
    """Search for the settings with the best `train.monitor` on the split `val`, or resume that search.

    Args:
        train: The settings that are not searched.
        tune: The search.
        cache: The cache that the trials train on.
        storage: Locations of the study, the checkpoints and the tracking.
        start: Starts a trial.
        tags: Tags of the MLflow runs.

    Raises:
        WrongInput: The search space does not fit the data, or a trial's input is invalid.
        CacheDamaged: The cache was changed or removed.
        NoTrialCompleted: No trial completed.
    """
    tune = fit_to_data(train, tune, open_cache(cache))
    name = study_name(train, tune, cache)
    with lock_study(storage, name):
        study = open_study(storage, name, train, tune, create=True)
        if lost := requeue_lost_trials(study):
            logger.info("%d trials of an earlier run ended without a value: they are retried", lost)
        fixed = train.model_dump(exclude=set(tune.space))
        parameters = {"train": fixed, "tune": tune.decisive(), "cache": {"digest": cache.digest}}
        with parent_run(storage, f"tune-{train.model}", f"study-{name}", parameters, tags) as parent:

            def start_trial(number: int, values: dict[str, Any]) -> RunningTrial:
                config = trial_config(train, tune, values)
                under = tags | trial_tags(parent.run_id, number)
                spec = TrainingSpec(train=config, distributed=None, cache=cache, storage=storage, tags=under)
                return start(TrialStart(spec, name, number, tune, parent.run_id))

            run_trials(study, tune, start_trial, on_cancelled=parent.end_trial)
            best = best_trial(study)
            assert best.value is not None, "a completed trial has a value"
            parent.log_search(trial_rows(study), best.number, best.params, best.value, monitored(train))
            num_trials = len(counted_trials(study))
    logger.info("the best of %d trials is %d: %s %.4f", num_trials, best.number, monitored(train), best.value)
    return SearchResult(with_values(train, best.params), best.value, trial_rows(study), parent.run_id)
