"""A trial of a search: a training run that reports each epoch to its study and ends when it is pruned."""

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from tasks.config.recipe import monitored, total_epochs
from tasks.config.tune import TuneConfig
from tasks.errors import Diverged, WrongInput
from tasks.launch.launcher import launch_ranks
from tasks.refs import RunRef, TrialReport
from tasks.tracking.runs import find_finished_run, run_metrics
from tasks.tracking.searches import find_newest_run, mark_pruned
from tasks.train.checkpoint_files import remove_checkpoints
from tasks.train.spec import TrainingSpec
from tasks.tune.study import ERROR, RUN_ID, open_study

logger = logging.getLogger("lakevision.tune")

MAX_ERROR_CHARACTERS = 1000
"""Approximate number of characters of an error that a study keeps."""


class Pruned(Exception):
    """The study pruned this trial; raised through the launcher, which ends the ranks."""


def get_trial(study: optuna.Study, number: int) -> Trial:
    """Return the trial with the given number.

    Raises:
        WrongInput: The study has no such trial.
    """
    for frozen in study.get_trials(deepcopy=False):
        if frozen.number == number:
            return Trial(study, frozen._trial_id)
    raise WrongInput(
        f"number is {number}, but the study '{study.study_name}' has no such trial",
        setting="number",
        way_out="give the number of an existing one",
    )


def make_reporter(trial: Trial) -> Callable[[dict[str, Any]], None]:
    """Return a callback for events of rank 0, which reports the metric and raises `Pruned` when the trial is pruned.

    Optuna's step is the number of epochs trained: Hyperband allocates epochs to trials.
    """
    reported = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def on_event(event: dict[str, Any]) -> None:
        epochs = int(event["epoch"])
        if epochs in reported:
            return
        reported.add(epochs)
        try:
            trial.report(event["value"], epochs)
        except UpdateFinishedTrialError:
            raise WrongInput(
                f"trial {trial.number} of the study '{trial.study.study_name}' was ended by another run of the search",
                way_out="no action is needed here",
            ) from None
        # After the last epoch, also by early stopping, pruning would save nothing.
        if not event["ends_training"] and trial.should_prune():
            raise Pruned

    return on_event


def run_trial(
    spec: TrainingSpec, study_name: str, number: int, tune: TuneConfig, stop: threading.Event | None = None
) -> TrialReport:
    """Train a trial, and report its result to the study: the best value of `train.monitor`, pruned, or failed.

    A diverged run counts as pruned with the worst value, so that the sampler learns from it.

    Args:
        spec: The training run.
        study_name: Name of the study, in the same home.
        number: Number of the trial in the study.
        tune: Settings of the pruner.
        stop: Ends the training run when it is set.

    Raises:
        WrongInput: The study or the trial does not exist, or the input of the training run is invalid.
        RankFailed, TimeoutError: As `launch_ranks`.
    """
    study = open_study(spec.storage, study_name, spec.train, tune, create=False)
    trial = get_trial(study, number)
    # Those of a pruned trial are removed, so that a full run of the same settings starts from scratch.
    checkpoints = spec.storage.checkpoints / spec.key
    try:
        run = find_finished_run(spec.storage, *spec.keys) or launch_ranks(spec, make_reporter(trial), stop)
        return _report_complete(spec, trial, run)
    except Pruned:
        if finished := find_finished_run(spec.storage, *spec.keys):
            return _report_complete(spec, trial, finished)  # It finished before the signal arrived.
        run_id = mark_pruned(spec.storage, spec.key)
        remove_checkpoints(checkpoints)
        trial.set_user_attr(RUN_ID, run_id)
        pruned = study.tell(number, state=TrialState.PRUNED)
        logger.info("trial %d is pruned at %s %s", number, monitored(spec.train), pruned.value)
        return TrialReport(number=number, state="pruned", value=pruned.value, run_id=run_id)
    except Diverged as error:
        logger.warning("trial %d: %s", number, error)
        run_id = find_newest_run(spec.storage, spec.key)
        trial.set_user_attr(RUN_ID, run_id)
        trial.set_user_attr(ERROR, str(error))
        # For `has_diverged`: the sampler ranks it last.
        trial.report(math.nan, total_epochs(spec.train) + 1)
        study.tell(number, state=TrialState.PRUNED)
        remove_checkpoints(checkpoints)
        return TrialReport(number=number, state="pruned", value=None, run_id=run_id)
    except BaseException as error:
        if not isinstance(error, UpdateFinishedTrialError):
            fail_trial(study, number, f"{type(error).__name__}: {error}")
        raise


def _report_complete(spec: TrainingSpec, trial: Trial, run: RunRef) -> TrialReport:
    trial.set_user_attr(RUN_ID, run.run_id)
    value = run_metrics(spec.storage, run)[f"best_{monitored(spec.train)}"]
    trial.study.tell(trial.number, value)
    return TrialReport(number=trial.number, state="complete", value=value, run_id=run.run_id)


def fail_trial(study: optuna.Study, number: int, reason: str) -> None:
    """Mark a trial as failed, unless the study has its result already."""
    trial = get_trial(study, number)
    try:
        # The last of a rank's lines has the cause.
        shortened = f"{reason[: MAX_ERROR_CHARACTERS // 4]}\n{reason[-MAX_ERROR_CHARACTERS:]}"
        trial.set_user_attr(ERROR, reason if len(reason) <= MAX_ERROR_CHARACTERS else shortened)
        study.tell(number, state=TrialState.FAIL)
    except (UpdateFinishedTrialError, ValueError):
        return  # Another process has reported its result.
