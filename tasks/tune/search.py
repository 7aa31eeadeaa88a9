"""The search itself: trials begun, watched and ended, and what came of them; it knows of no Prefect."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import optuna

from tasks import tracking
from tasks.cache.manifest import open_cache
from tasks.config.train import TrainConfig
from tasks.config.tune import TuneConfig, with_values
from tasks.errors import SubmittedRunCancelled, WrongInput
from tasks.launch.spec import RankSpec
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.tune.space import distributions, fit_to_data, study_name, trial_config
from tasks.tune.study import (
    best_trial,
    counted_trials,
    give_up_trial,
    have_study,
    next_trial,
    open_study,
    redo_lost_trials,
    trial_rows,
)
from tasks.tune.trial import fail_trial, run_trial

logger = logging.getLogger("lakevision.tune")

LOOK_SECONDS = 0.2
"""Between two looks at the trials that run."""


class RunningTrial(Protocol):
    """A trial on its way, wherever it runs."""

    def poll(self) -> bool:
        """Say whether it ended well, pruned or not; raises where it did not."""

    def cancel(self) -> None:
        """Ask it to end, and return at once."""

    def join(self) -> None:
        """Return when nothing of it is left here."""


@dataclass(frozen=True)
class TrialStart:
    """What it takes to run one trial, here or on another machine."""

    spec: RankSpec
    study: str
    number: int
    tune: TuneConfig
    parent_run_id: str


@dataclass(frozen=True)
class SearchResult:
    """What came of a search."""

    best: TrainConfig
    """The settings of the best trial, with all of the epochs."""
    value: float
    """What the best trial reached of `train.monitor`."""
    rows: list[dict[str, Any]]
    """As `trial_rows`."""
    run_id: str
    """The MLflow run under which those of the trials are."""


class TrialThreads:
    """Begins trials in this process, each in a slot of its own: its share of the cores, and a GPU in turn."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))

    def __call__(self, start: TrialStart) -> "TrialThread":
        """Begin a trial, of which no more than the slots run at once."""
        slot = min(self._free)
        self._free.remove(slot)
        spec = start.spec.model_copy(update={"slot": slot, "num_slots": self._num_slots})
        return TrialThread(replace(start, spec=spec), lambda: self._free.append(slot))


class TrialThread:
    """A trial in this process: its ranks are processes of their own, and a thread watches them."""

    def __init__(self, start: TrialStart, on_end: Callable[[], None]) -> None:
        self._start = start
        self._on_end = on_end
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"trial-{start.number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_trial(self._start.spec, self._start.study, self._start.number, self._start.tune, self._stop)
        except BaseException as error:  # Raised in the thread that looks at the trials.
            self._error = error
        finally:
            self._on_end()

    def poll(self) -> bool:
        """Say whether it ended well.

        Raises:
            WrongInput, RankFailed, TimeoutError: As `run_trial`.
        """
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """Ask its ranks to end."""
        self._stop.set()

    def join(self) -> None:
        """Return when its ranks are gone."""
        self._thread.join()


def run_trials(
    study: optuna.Study,
    tune: TuneConfig,
    start: Callable[[int, dict[str, Any]], RunningTrial],
    look_seconds: float = LOOK_SECONDS,
    on_cancelled: Callable[[int], None] = lambda _number: None,
) -> None:
    """Begin trials, `parallel` at a time, until there are as many as there are to be or the time is up.

    A trial that fails (out of memory, a worker that was lost) is one without a value; the search goes on, and does it
    again when it is run again. One that a person cancels has no value either, and is not done again.

    Args:
        study: Which we have to ourselves.
        tune: How many trials, how many at once, and for how long.
        start: From a trial's number and values to the trial on its way, which tells the study what came of it.
        look_seconds: Between two looks at the trials that run.
        on_cancelled: Called with the number of a trial that a person cancelled.

    Raises:
        WrongInput: A trial's input cannot be; what runs is ended.
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
            for number in [number for number, going in running.items() if _is_over(study, number, going, on_cancelled)]:
                del running[number]
            time.sleep(look_seconds)
    except BaseException:
        # All are asked before any is waited for: each may take half a minute, which is all that Prefect gives us.
        for left in running.values():
            left.cancel()
        for left in running.values():
            left.join()
        raise


def _is_over(study: optuna.Study, number: int, trial: RunningTrial, on_cancelled: Callable[[int], None]) -> bool:
    try:
        if not trial.poll():
            return False
    except SubmittedRunCancelled as error:
        logger.warning("trial %d is given up: %s", number, error)
        give_up_trial(study, number)
        fail_trial(study, number, str(error))
        on_cancelled(number)
    except WrongInput:
        raise  # With the same settings it would be so again.
    except Exception as error:
        logger.warning("trial %d has no value: %s", number, error)
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
    """Search for the settings that give the best `train.monitor` on the split `val`, or go on with that search.

    Args:
        train: The settings that are not searched.
        tune: The search.
        cache: What the trials train from.
        storage: Where the study, the checkpoints and the tracking lie.
        start: Sends a trial on its way.
        tags: Tags of the MLflow runs.

    Raises:
        WrongInput: The space has what these data cannot be trained with, or a trial's input cannot be.
        CacheDamaged: The cache is not what it was.
        NoTrialCompleted: Of no trial it is known how good it is.
    """
    tune = fit_to_data(train, tune, open_cache(cache))
    name = study_name(train, tune, cache)
    with have_study(storage, name):
        study = open_study(storage, name, train, tune, create=True)
        if lost := redo_lost_trials(study):
            logger.info("%d trials of an earlier run ended without a value: they are done again", lost)
        fixed = train.model_dump(exclude=set(tune.space))
        about = {"train": fixed, "tune": tune.decisive(), "cache": {"digest": cache.digest}}
        with tracking.parent_run(storage, f"tune-{train.model}", f"study-{name}", about, tags) as parent:

            def start_trial(number: int, values: dict[str, Any]) -> RunningTrial:
                config = trial_config(train, tune, values)
                under = tags | tracking.trial_tags(parent.run_id, number)
                spec = RankSpec(train=config, distributed=None, cache=cache, storage=storage, tags=under)
                return start(TrialStart(spec, name, number, tune, parent.run_id))

            run_trials(study, tune, start_trial, on_cancelled=parent.end_trial)
            best = best_trial(study)
            assert best.value is not None, "it came to its end"
            parent.log_search(trial_rows(study), best.number, best.params, best.value, train.monitor)
            num_trials = len(counted_trials(study))
    logger.info("the best of %d trials is %d: %s %.4f", num_trials, best.number, train.monitor, best.value)
    return SearchResult(with_values(train, best.params), best.value, trial_rows(study), parent.run_id)
