"""The study of a search: an Optuna study in a database below the home, which one search at a time goes on with."""

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import HyperbandPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from tasks.config.train import TrainConfig
from tasks.config.tune import TuneConfig
from tasks.errors import WrongInput
from tasks.storage import Storage
from tasks.system.home import make_private_file

logger = logging.getLogger("lakevision.tune")

RETRY_OF = "lakevision.retry_of"
"""Attribute of a trial that does again what another one, which ended without a value, began: that one's number."""
ERROR = "lakevision.error"
RUN_ID = "lakevision.run_id"
CANCELLED = "lakevision.cancelled"
"""Attribute of a study: the numbers of the trials that a person cancelled, which are not done again.

No attribute of the trials: one that has ended takes none, and its own process says that it failed when it is ended."""

BUSY_SECONDS = 60
"""How long a process waits for the database while another one writes to it."""


class NoTrialCompleted(WrongInput):
    """No trial of a search came to its end, so that there is nothing to choose from.

    Not retried, for whatever reason they failed: that would be every failed trial once more, with all of
    `tune.timeout_seconds` anew, and where all have failed, lost workers among it, the reason is one that a few seconds
    do not mend. A person mends it and runs the search again, which goes on from the trials' checkpoints.
    """


def studies_folder(storage: Storage) -> Path:
    """Return the folder of the studies' database and locks; local or on a shared file system."""
    return Path(storage.home) / "studies"


@contextmanager
def have_study(storage: Storage, name: str) -> Iterator[None]:
    """Have a study to ourselves until the block ends, after whoever has it now; a lock that ends with its process."""
    folder = studies_folder(storage)
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another run does exactly this search: waiting until it ends")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def open_study(storage: Storage, name: str, train: TrainConfig, tune: TuneConfig, *, create: bool) -> optuna.Study:
    """Open a study, whose trials Hyperband prunes.

    Hyperband (Li et al., 2018, "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization") as Optuna has
    it: brackets of successive halving, each with another number of epochs before its first cut.

    Args:
        storage: Where it lies.
        name: Its name.
        train: Names the metric and the epochs.
        tune: The rules of pruning.
        create: Whether to make it where it is not.

    Raises:
        WrongInput: It is not there.
    """
    folder = studies_folder(storage)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # What became of a trial, we say ourselves.
    if not create and not (folder / "studies.db").exists():
        raise _missing(name, folder)
    # Two that make the tables of one database at once fail both.
    with filelock.FileLock(folder / "studies.db.lock"):
        make_private_file(folder / "studies.db")
        database = RDBStorage(
            f"sqlite:///{folder / 'studies.db'}", engine_kwargs={"connect_args": {"timeout": BUSY_SECONDS}}
        )
    pruner = HyperbandPruner(tune.min_epochs, tune.trial_epochs(train), tune.reduction_factor)
    if create:
        direction = "minimize" if train.monitor == "val_loss" else "maximize"
        return optuna.create_study(
            storage=database, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
        )
    try:
        return optuna.load_study(study_name=name, storage=database, pruner=pruner)
    except KeyError:
        raise _missing(name, folder) from None


def _missing(name: str, folder: Path) -> WrongInput:
    return WrongInput(
        f"study is '{name}', which '{folder}' does not have: the worker must see the storage.home of the search"
    )


def superseded(study: optuna.Study) -> set[int]:
    """Return the numbers of the trials that another one does again."""
    return {trial.user_attrs[RETRY_OF] for trial in study.get_trials(deepcopy=False) if RETRY_OF in trial.user_attrs}


def counted_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return every trial but those that another one does again, ordered by number."""
    gone = superseded(study)
    return [trial for trial in study.get_trials(deepcopy=False) if trial.number not in gone]


def cancelled_trials(study: optuna.Study) -> set[int]:
    """Return the numbers of the trials that a person cancelled."""
    return set(study.user_attrs.get(CANCELLED, []))


def give_up_trial(study: optuna.Study, number: int) -> None:
    """Remember that a person cancelled a trial; the caller has the study."""
    study.set_user_attr(CANCELLED, sorted(cancelled_trials(study) | {number}))


def redo_lost_trials(study: optuna.Study) -> int:
    """Put every trial that ended without a value on the list again, and return how many; the caller has the study.

    Not those that a person cancelled.

    A trial that still runs lost its process, or the process that waited for it: it is failed first, so that what may
    be left of it ends with its next report. Its training goes on from its last checkpoint.
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


def next_trial(study: optuna.Study, space: Mapping[str, BaseDistribution], tune: TuneConfig) -> Trial | None:
    """Return the next trial, its values drawn; None where there are as many as there are to be.

    What is drawn is a function of the seed, of how many were drawn before, and of what came of them: a search that was
    stopped does not begin again with the values that it began with.
    """
    known = counted_trials(study)
    waiting = any(trial.state == TrialState.WAITING for trial in known)
    if not waiting and len(known) >= tune.num_trials:
        return None
    drawn = len([trial for trial in known if trial.state != TrialState.WAITING])
    seed = int.from_bytes(hashlib.sha256(f"{tune.seed} {drawn}".encode()).digest()[:4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        # A constant liar: trials that run at once keep away from each other.
        study.sampler = TPESampler(seed=seed, constant_liar=tune.parallel > 1)
    return study.ask(dict(space))


def trial_rows(study: optuna.Study) -> list[dict[str, Any]]:
    """Return what came of every trial: number, state, value, error, MLflow run and the values drawn."""
    gone, cancelled = superseded(study), cancelled_trials(study)

    def state(trial: FrozenTrial) -> str:
        if trial.number in gone:
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
        NoTrialCompleted: There is none.
    """
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        raise NoTrialCompleted(_why_none_completed(study))
    return study.best_trial


def _why_none_completed(study: optuna.Study) -> str:
    """Say in one sentence what became of the trials of a study of which none completed, and what to do."""
    known = superseded(study)
    rows = [row for row in trial_rows(study) if row["number"] not in known]
    named = {"fail": "failed", "pruned": "diverged or pruned", "cancelled": "cancelled", "waiting": "not begun"}
    counts = {said: sum(row["state"] == state for row in rows) for state, said in named.items()}
    became = ", ".join(f"{count} {said}" for said, count in counts.items() if count)
    told = [row for row in rows if row["error"] and row["state"] in {"fail", "pruned"}]
    last = f"; the last, trial {told[-1]['number']}, ended with '{_on_one_line(told[-1]['error'])}'" if told else ""
    if counts["failed"] or counts["not begun"]:
        way_out = "mend that and run the search again, which does again those that failed"
    else:
        way_out = "search other values (tune.search), or let more trials be drawn (tune.num_trials)"
    return f"none of the {len(rows)} trials of the search came to its end ({became or 'none began'}){last}: {way_out}"


def _on_one_line(error: str) -> str:
    """Return the first line of an error, and the last one, which in a rank's traceback names the reason."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ... ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)
