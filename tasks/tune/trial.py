"""One trial of a search: a training that reports each epoch to its study, and ends when that prunes it."""

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from tasks import tracking
from tasks.config.tune import TuneConfig
from tasks.errors import Diverged, WrongInput
from tasks.launch.launcher import launch_ranks
from tasks.launch.spec import RankSpec
from tasks.refs import RunRef, TrialReport
from tasks.train.checkpoint_files import remove_checkpoints
from tasks.tune.study import ERROR, RUN_ID, open_study

logger = logging.getLogger("lakevision.tune")

MOST_SAID = 1000
"""Characters of an error that a study keeps, about."""


class Pruned(Exception):
    """The study has no hope of this trial; raised through the launcher, which ends the ranks."""


def trial_of(study: optuna.Study, number: int) -> Trial:
    """Return a trial by its number, to report to.

    Raises:
        WrongInput: The study has no such trial.
    """
    for frozen in study.get_trials(deepcopy=False):
        if frozen.number == number:
            return Trial(study, frozen._trial_id)
    raise WrongInput(f"number is {number}, but the study '{study.study_name}' has no such trial: give one of its own")


def reporter(trial: Trial) -> Callable[[dict[str, Any]], None]:
    """Return what takes the events of a trial's rank 0: it reports the metric, and raises when the trial is pruned.

    A step is the number of epochs trained: Hyperband divides epochs among trials.
    """
    known = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def on_event(event: dict[str, Any]) -> None:
        epochs = int(event["epoch"])
        if epochs in known:
            return
        known.add(epochs)
        try:
            trial.report(event["value"], epochs)
        except UpdateFinishedTrialError:
            raise WrongInput(
                f"trial {trial.number} of the study '{trial.study.study_name}' was ended by another run of the search: "
                "nothing is to be done here"
            ) from None
        # After the last epoch, be it that of early stopping, there is nothing left to save.
        if not event["ends_training"] and trial.should_prune():
            raise Pruned

    return on_event


def run_trial(
    spec: RankSpec, study_name: str, number: int, tune: TuneConfig, stop: threading.Event | None = None
) -> TrialReport:
    """Train as a trial, and tell the study what came of it: the best value of `train.monitor`, pruned, or failed.

    A training that diverges is the worst there is, and one that the study should learn from: it counts as pruned.

    Args:
        spec: What to train.
        study_name: The study, which lies below the same home.
        number: The trial's number in it.
        tune: The rules of pruning.
        stop: Ends the training when it is set.

    Raises:
        WrongInput: The study or trial is not there, or the training's own input cannot be.
        RankFailed, TimeoutError: As `launch_ranks`.
    """
    study = open_study(spec.storage, study_name, spec.train, tune, create=False)
    trial = trial_of(study, number)
    try:
        run = tracking.find_finished_run(spec.storage, spec.key) or launch_ranks(spec, reporter(trial), stop)
        return _tell_complete(spec, trial, run)
    except Pruned:
        if finished := tracking.find_finished_run(spec.storage, spec.key):
            return _tell_complete(spec, trial, finished)  # It was quicker than the signal that was to end it.
        run_id = tracking.mark_pruned(spec.storage, spec.key)
        _remove_checkpoint(spec)
        trial.set_user_attr(RUN_ID, run_id)
        told = study.tell(number, state=TrialState.PRUNED)
        logger.info("trial %d is pruned at %s %s", number, spec.train.monitor, told.value)
        return TrialReport(number=number, state="pruned", value=told.value, run_id=run_id)
    except Diverged as error:
        logger.warning("trial %d: %s", number, error)
        run_id = tracking.find_newest_run(spec.storage, spec.key)
        trial.set_user_attr(RUN_ID, run_id)
        trial.set_user_attr(ERROR, str(error))
        # Optuna takes a pruned trial for as good as its last value: no number is the worst.
        trial.report(math.nan, spec.train.total_epochs + 1)
        study.tell(number, state=TrialState.PRUNED)
        _remove_checkpoint(spec)
        return TrialReport(number=number, state="pruned", value=None, run_id=run_id)
    except BaseException as error:
        if not isinstance(error, UpdateFinishedTrialError):
            fail_trial(study, number, f"{type(error).__name__}: {error}")
        raise


def _tell_complete(spec: RankSpec, trial: Trial, run: RunRef) -> TrialReport:
    trial.set_user_attr(RUN_ID, run.run_id)
    value = tracking.run_metrics(spec.storage, run)[f"best_{spec.train.monitor}"]
    trial.study.tell(trial.number, value)
    return TrialReport(number=trial.number, state="complete", value=value, run_id=run.run_id)


def _remove_checkpoint(spec: RankSpec) -> None:
    """Let whoever trains the same in full begin anew, in a run of its own."""
    remove_checkpoints(spec.storage.checkpoints / spec.key)


def fail_trial(study: optuna.Study, number: int, why: str) -> None:
    """Tell the study that a trial ended without a value, unless it knows already what became of it."""
    trial = trial_of(study, number)
    try:
        # Of a rank's last lines the last one says most.
        trial.set_user_attr(ERROR, why if len(why) <= MOST_SAID else f"{why[: MOST_SAID // 4]}\n{why[-MOST_SAID:]}")
        study.tell(number, state=TrialState.FAIL)
    except (UpdateFinishedTrialError, ValueError):
        return  # Somebody else has told.
