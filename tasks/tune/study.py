"""The Optuna study of a search, in a journal in the home folder, used by one search at a time."""

import hashlib
import logging
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import HyperbandPruner
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from tasks.config.recipe import lower_is_better, monitored
from tasks.config.train import TrainConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput
from tasks.storage import Storage
from tasks.system.home import make_private_file
from tasks.system.locks import lock_once_free

logger = logging.getLogger("lakevision.tune")

RETRY_OF = "lakevision.retry_of"
"""Attribute of a retried trial: the number of the trial that it retries."""
ERROR = "lakevision.error"
RUN_ID = "lakevision.run_id"
CANCELLED = "lakevision.cancelled"
"""Attribute of a study: the numbers of the trials that a user cancelled, which are not retried.

Not an attribute of the trials: a cancelled trial reports itself as failed, and ended trials take no attributes."""

BUSY_SECONDS = 60
"""Timeout of SQLite's lock on the database of older releases, seconds."""


class NoTrialCompleted(WrongInput):
    """No trial of a search completed.

    Prefect does not retry this error. A retry would repeat every failed trial with a new `tune.timeout_seconds`, and a
    cause that fails all trials, even lost workers, lasts for more than seconds. The user fixes it and runs the search
    again, which resumes the trials from their checkpoints.
    """


def studies_folder(storage: Storage) -> Path:
    """Return the folder of the studies' journals and locks, on a local or a shared file system."""
    return Path(storage.home) / "studies"


def lock_study(storage: Storage, name: str) -> AbstractContextManager[None]:
    """Hold the exclusive lock of a study within the block, after waiting for it; it is released with its process."""
    waits = "another run has the exclusive lock of this search: waiting until it ends"
    return lock_once_free(studies_folder(storage) / f"{name}.lock", partial(logger.info, waits))


def open_study(storage: Storage, name: str, train: TrainConfig, tune: TuneConfig, *, create: bool) -> optuna.Study:
    """Open a study whose trials Hyperband prunes.

    Optuna's implementation of Hyperband (Li et al., 2018, "Hyperband: A Novel Bandit-Based Approach to Hyperparameter
    Optimization"): brackets of successive halving, which differ in the number of epochs before the first pruning.

    Args:
        storage: Location of the study.
        name: Name of the study.
        train: Settings with the metric and the number of epochs.
        tune: Settings of the pruner.
        create: Whether to create the study if it does not exist.

    Raises:
        WrongInput: The study does not exist and `create` is false.
    """
    folder = studies_folder(storage)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # The search logs results itself.
    found = _open_storage(folder, name, create=create)
    pruner = HyperbandPruner(tune.min_epochs, tune.trial_epochs(train), tune.reduction_factor)
    if create:
        direction = "minimize" if lower_is_better(monitored(train)) else "maximize"
        return optuna.create_study(
            storage=found, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
        )
    try:
        return optuna.load_study(study_name=name, storage=found, pruner=pruner)
    except KeyError:
        raise _missing(name, folder) from None


class JournalLock(JournalFileOpenLock):
    """Lock on a journal of a study, which holds on a network file system, too."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal

    def acquire(self) -> bool:
        """Acquire the lock, and remove the part of a line that a killed process or a full disk left at the end."""
        acquired = super().acquire()
        with self._journal.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return acquired


def _open_storage(folder: Path, name: str, *, create: bool) -> BaseStorage:
    """Return the storage of a study: the database of older releases if it is there, else a journal of its own.

    SQLite's locks do not hold on every network file system.

    Raises:
        WrongInput: As `open_study`.
    """
    if (folder / "studies.db").exists():
        # Two processes that upgrade the tables of one database at once both fail.
        with filelock.FileLock(folder / "studies.db.lock"):
            database = RDBStorage(
                f"sqlite:///{folder / 'studies.db'}", engine_kwargs={"connect_args": {"timeout": BUSY_SECONDS}}
            )
        if name in optuna.get_all_study_names(database):
            return database
    journal = folder / f"{name}.journal"
    if not create and not journal.exists():
        raise _missing(name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    make_private_file(journal)
    return JournalStorage(JournalFileBackend(str(journal), JournalLock(journal)))


def _missing(name: str, folder: Path) -> WrongInput:
    return WrongInput(
        f"study is '{name}', which does not exist in '{folder}'",
        setting="study",
        way_out="the worker needs the storage.home of the search",
    )


def superseded(study: optuna.Study) -> set[int]:
    """Return the numbers of the trials that another trial retries."""
    return {trial.user_attrs[RETRY_OF] for trial in study.get_trials(deepcopy=False) if RETRY_OF in trial.user_attrs}


def counted_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return every trial except those that another trial retries, ordered by number."""
    retried = superseded(study)
    return [trial for trial in study.get_trials(deepcopy=False) if trial.number not in retried]


def cancelled_trials(study: optuna.Study) -> set[int]:
    """Return the numbers of the trials that a user cancelled."""
    return set(study.user_attrs.get(CANCELLED, []))


def mark_cancelled(study: optuna.Study, number: int) -> None:
    """Record that a user cancelled a trial; the caller holds the lock of the study."""
    study.set_user_attr(CANCELLED, sorted(cancelled_trials(study) | {number}))


def requeue_lost_trials(study: optuna.Study) -> int:
    """Enqueue again every trial that ended without a value, and return how many; the caller holds the lock.

    Cancelled trials are not retried.

    A trial in the state RUNNING lost its own process or that of its search. It is failed first, so that any remaining
    process of it ends with its next report. Its training run resumes from its last checkpoint.
    """
    lost, cancelled = 0, cancelled_trials(study)
    for trial in counted_trials(study):
        if trial.number in cancelled:
            continue
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        elif trial.state != TrialState.FAIL:
            continue
        lost += 1
        study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={RETRY_OF: trial.number},
            )
        )
    return lost


class Sampler(TPESampler):
    """Optuna's TPE sampler, for which a diverged trial is the worst of the pruned ones."""

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value of a parameter, as TPE draws it from the trials so far.

        TPE ranks pruned trials by their last epoch, those without one last. The NaN of a diverged trial has an epoch
        beyond the last one, so TPE would rank it first.
        """
        trials = study._get_trials()  # of all brackets, as TPE reads them
        if any(map(has_diverged, trials)):
            study = optuna.create_study(direction=study.direction)
            for known in trials:
                known.intermediate_values = {} if has_diverged(known) else known.intermediate_values
            study.add_trials(trials)
        return super().sample_independent(study, trial, param_name, param_distribution)


def has_diverged(trial: FrozenTrial) -> bool:
    """Return whether the training run of a trial diverged: its last value is NaN."""
    return trial.last_step is not None and math.isnan(trial.intermediate_values[trial.last_step])


def next_trial(study: optuna.Study, space: Mapping[str, BaseDistribution], tune: TuneConfig) -> Trial | None:
    """Return the next trial with its values drawn, or None if there are `tune.num_trials` already.

    The values depend on the seed, the number of trials drawn before, and their results. A resumed search therefore
    does not draw its first values again.
    """
    known = counted_trials(study)
    waiting = any(trial.state == TrialState.WAITING for trial in known)
    if not waiting and len(known) >= tune.num_trials:
        return None
    drawn = len([trial for trial in known if trial.state != TrialState.WAITING])
    seed = int.from_bytes(hashlib.sha256(f"{tune.seed} {drawn}".encode()).digest()[:4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        # The constant liar keeps concurrent trials from sampling similar values.
        study.sampler = Sampler(seed=seed, constant_liar=tune.parallel > 1)
    return study.ask(dict(space))


def trial_rows(study: optuna.Study) -> list[dict[str, Any]]:
    """Return a row per trial: number, state, value, drawn values, MLflow run and error."""
    retried, cancelled = superseded(study), cancelled_trials(study)

    def state(trial: FrozenTrial) -> str:
        if trial.number in retried:
            return "redone"
        return "cancelled" if trial.number in cancelled else trial.state.name.lower()

    return [
        {
            "number": trial.number,
            "state": state(trial),
            "value": trial.value,
            **{f"train.{name}": value for name, value in sorted(trial.params.items())},
            "run_id": trial.user_attrs.get(RUN_ID),
            "error": trial.user_attrs.get(ERROR),
        }
        for trial in study.get_trials(deepcopy=False)
    ]


def best_trial(study: optuna.Study) -> FrozenTrial:
    """Return the best of the trials that completed.

    Raises:
        NoTrialCompleted: No trial completed.
    """
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        raise _none_completed(study)
    return study.best_trial


def _none_completed(study: optuna.Study) -> NoTrialCompleted:
    """Return the error with the number of trials per state, the last error, and the way out."""
    rows = [row for row in trial_rows(study) if row["state"] != "redone"]
    labels = {"fail": "failed", "pruned": "diverged or pruned", "cancelled": "cancelled", "waiting": "not started"}
    counts = {label: sum(row["state"] == state for row in rows) for state, label in labels.items()}
    summary = ", ".join(f"{count} {label}" for label, count in counts.items() if count)
    with_error = [row for row in rows if row["error"] and row["state"] in {"fail", "pruned"}]
    last = ""
    if with_error:
        number, error = with_error[-1]["number"], with_error[-1]["error"]
        last = f", and trial {number} ended last with '{_on_one_line(error)}'"
    if counts["failed"] or counts["not started"]:
        way_out = "fix the cause and run the search again, which retries the failed trials"
    else:
        way_out = "search other values (tune.search), or draw more trials (tune.num_trials)"
    message = f"none of the {len(rows)} trials of the search completed ({summary or 'none started'}){last}"
    return NoTrialCompleted(message, way_out=way_out)


def _on_one_line(error: str) -> str:
    """Return the first and the last line of an error; the last line of a rank's traceback has the cause."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ... ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)
