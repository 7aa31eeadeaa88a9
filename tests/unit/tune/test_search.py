"""The search loop on a real study, with fake trials."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tasks.config.recipe import total_epochs
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.config.tune import Range, TuneConfig
from tasks.errors import SubmittedRunCancelled, WrongInput
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.system.slots import Slot
from tasks.train.spec import TrainingSpec
from tasks.tune.search import RunningTrial, TrialStart, TrialThread, run_trials
from tasks.tune.space import distributions
from tasks.tune.study import (
    NoTrialCompleted,
    best_trial,
    counted_trials,
    next_trial,
    open_study,
    requeue_lost_trials,
    trial_rows,
)
from tasks.tune.trial import Pruned, fail_trial, get_trial, make_reporter

# With two epochs Hyperband has one bracket, so that pruning does not depend on a trial's number.
TRAIN = TrainConfig(recipe="scratch", weights="none", monitor="val_accuracy", max_epochs=2)
TUNE = TuneConfig(search={"learning_rate": Range(low=1e-4, high=1e-1, log=True)}, num_trials=14)


@pytest.fixture
def study(storage: Storage) -> optuna.Study:
    """Return a new study."""
    return open_study(storage, "study", TRAIN, TUNE, create=True)


def quality(values: dict[str, Any]) -> float:
    """Return the quality of a learning rate, with its maximum at 0.01."""
    return 1 - abs(math.log10(values["learning_rate"]) + 2) / 4


class Trials:
    """Fake trials that end after a number of polls and report the quality of their learning rate."""

    def __init__(self, study: optuna.Study, polls: int = 1, fails: Callable[[int], Exception | None] | None = None):
        self.study, self.polls, self.fails = study, polls, fails
        self.running: set[int] = set()
        self.max_running = 0
        self.cancelled: list[int] = []
        self.calls: list[tuple[str, int]] = []

    def start(self, number: int, values: dict[str, Any]) -> RunningTrial:
        """Start a trial."""
        self.running.add(number)
        self.max_running = max(self.max_running, len(self.running))
        return _Trial(self, number, values)


class _Trial:
    def __init__(self, trials: Trials, number: int, values: dict[str, Any]) -> None:
        self.trials, self.number, self.values, self.polls = trials, number, values, trials.polls

    def poll(self) -> bool:
        self.polls -= 1
        if self.polls > 0:
            return False
        self.trials.running.discard(self.number)
        if self.trials.fails and (error := self.trials.fails(self.number)):
            raise error
        self.trials.study.tell(self.number, quality(self.values))
        return True

    def cancel(self) -> None:
        self.trials.cancelled.append(self.number)
        self.trials.calls.append(("cancel", self.number))

    def join(self) -> None:
        self.trials.calls.append(("join", self.number))


def drawn_rates(study: optuna.Study) -> list[float]:
    """Return the learning rates of the counted trials."""
    return [trial.params["learning_rate"] for trial in counted_trials(study)]


def test_search_runs_num_trials_once_and_improves(study: optuna.Study) -> None:
    """Trials run one at a time, and a second run of the search adds none."""
    trials = Trials(study)
    run_trials(study, TUNE, trials.start, poll_seconds=0)
    run_trials(study, TUNE, trials.start, poll_seconds=0)

    assert len(study.trials) == 14
    assert len(set(drawn_rates(study))) == 14
    assert trials.max_running == 1
    assert study.best_value > 0.9


def test_resumed_search_draws_the_values_of_an_uninterrupted_search(study: optuna.Study, storage: Storage) -> None:
    """A resumed search retries the lost trial first, and then draws the same values."""
    run_trials(study, TUNE, Trials(study).start, poll_seconds=0)

    stopped = open_study(storage, "stopped", TRAIN, TUNE, create=True)
    run_trials(stopped, TUNE.model_copy(update={"num_trials": 11}), Trials(stopped).start, poll_seconds=0)
    lost = Trials(stopped, fails=lambda number: KeyboardInterrupt())  # type: ignore[arg-type, return-value]  # a test's failure of another type
    with pytest.raises(KeyboardInterrupt):
        run_trials(stopped, TUNE, lost.start, poll_seconds=0)
    assert lost.cancelled == [11]
    again = open_study(storage, "stopped", TRAIN, TUNE, create=True)
    assert requeue_lost_trials(again) == 1
    run_trials(again, TUNE, Trials(again).start, poll_seconds=0)

    assert drawn_rates(again) == drawn_rates(study)
    assert [row["state"] for row in trial_rows(again)].count("redone") == 1
    assert [trial.state for trial in again.trials].count(TrialState.COMPLETE) == 14


def test_higher_num_trials_adds_trials_to_a_search(study: optuna.Study) -> None:
    """Existing trials count."""
    run_trials(study, TUNE.model_copy(update={"num_trials": 3}), Trials(study).start, poll_seconds=0)
    before = drawn_rates(study)
    run_trials(study, TUNE.model_copy(update={"num_trials": 5}), Trials(study).start, poll_seconds=0)

    assert drawn_rates(study)[:3] == before
    assert len(study.trials) == 5


def test_number_of_concurrent_trials_is_parallel(study: optuna.Study) -> None:
    """A free slot is filled immediately, and no more than `parallel` trials run."""
    trials = Trials(study, polls=3)
    run_trials(study, TUNE.model_copy(update={"parallel": 3, "num_trials": 7}), trials.start, poll_seconds=0)

    assert trials.max_running == 3
    assert len(set(drawn_rates(study))) == 7


def test_no_trial_starts_after_the_timeout(study: optuna.Study) -> None:
    """Running trials complete after `timeout_seconds`, and no others start."""
    trials = Trials(study, polls=12)
    run_trials(study, TUNE.model_copy(update={"parallel": 2, "timeout_seconds": 1}), trials.start, poll_seconds=0.1)

    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2


def test_failed_trial_has_no_value_and_is_retried_by_the_next_run(study: optuna.Study) -> None:
    """The search continues after a failed trial, and its next run retries it with the same values."""
    four = TUNE.model_copy(update={"num_trials": 4})
    trials = Trials(study, fails=lambda number: RuntimeError("out of memory") if number == 1 else None)
    run_trials(study, four, trials.start, poll_seconds=0)
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    assert trial_rows(study)[1]["error"] == "RuntimeError: out of memory"

    assert requeue_lost_trials(study) == 1
    run_trials(study, four, Trials(study).start, poll_seconds=0)

    assert study.trials[4].state == TrialState.COMPLETE
    assert study.trials[4].params == study.trials[1].params
    assert requeue_lost_trials(study) == 0


def test_wrong_input_ends_the_search_and_its_running_trials(study: optuna.Study) -> None:
    """Invalid input of a trial is not retried, and cancels all running trials."""
    trials = Trials(study, polls=2, fails=lambda number: WrongInput("a sentence") if number == 0 else None)
    with pytest.raises(WrongInput, match="a sentence"):
        run_trials(study, TUNE.model_copy(update={"parallel": 3}), trials.start, poll_seconds=0)

    assert {1, 2} <= set(trials.cancelled)
    # All are cancelled before the first join, so that each has the whole grace period.
    assert [call for call, _number in trials.calls] == ["cancel"] * 3 + ["join"] * 3


def test_cancelled_trial_is_not_retried_and_the_search_continues(study: optuna.Study) -> None:
    """No later run retries a cancelled trial, even if its own process reported a failure before."""
    four = TUNE.model_copy(update={"num_trials": 4})
    ended: list[int] = []

    def cancelled(number: int) -> Exception | None:
        if number == 2:
            fail_trial(study, number, "TerminationSignal: ")
        return SubmittedRunCancelled(f"trial {number} was cancelled") if number in {1, 2} else None

    run_trials(study, four, Trials(study, fails=cancelled).start, poll_seconds=0, on_cancelled=ended.append)

    assert [row["state"] for row in trial_rows(study)] == ["complete", "cancelled", "cancelled", "complete"]
    assert ended == [1, 2]
    assert requeue_lost_trials(study) == 0
    run_trials(study, four, Trials(study).start, poll_seconds=0)
    assert len(study.trials) == 4


def test_search_without_a_completed_trial_reports_states_and_last_error(study: optuna.Study) -> None:
    """The error is one sentence with the last failure's cause, which is the last line of a rank's output."""
    output = "RankFailed: rank 0 ended with status 1; its last lines:\n" + "a line\n" * 500 + "MemoryError: no room"
    study.ask({})
    study.ask({})
    study.tell(1, state=TrialState.PRUNED)
    fail_trial(study, 0, output)
    message = (
        "none of the 2 trials of the search completed (1 failed, 1 diverged or pruned), and trial 0 ended last with "
        "'RankFailed: rank 0 ended with status 1; its last lines: ... MemoryError: no room': fix the cause and run "
        "the search again, which retries the failed trials"
    )
    with pytest.raises(NoTrialCompleted) as none:
        best_trial(study)
    assert str(none.value) == message
    # Prefect retries no WrongInput.
    assert isinstance(none.value, WrongInput)


def test_retried_trials_are_counted_once_in_the_error(study: optuna.Study) -> None:
    """The error counts a retried trial once, and advises a rerun only if a trial failed or is waiting."""
    study.ask({})
    fail_trial(study, 0, "a worker was lost")
    requeue_lost_trials(study)
    with pytest.raises(NoTrialCompleted, match=r"none of the 1 trials .* \(1 not started\): fix"):
        best_trial(study)
    study.ask({})
    study.tell(1, state=TrialState.PRUNED)
    with pytest.raises(NoTrialCompleted, match=r"none of the 1 .* diverged or pruned\): search"):
        best_trial(study)


def test_trial_that_is_not_the_best_after_an_epoch_is_pruned(study: optuna.Study) -> None:
    """The best trial continues, and no trial is pruned after its last epoch."""
    values = {0: 0.5, 1: 0.4, 2: 0.6}
    for number, value in values.items():
        study.ask({})
        on_event = make_reporter(get_trial(study, number))
        with pytest.raises(Pruned) if number == 1 else nullcontext():
            on_event({"epoch": 1, "ends_training": False, "value": value})
            on_event({"epoch": 2, "ends_training": True, "value": 0.0})


@pytest.mark.parametrize("max_epochs", [TRAIN.max_epochs, 81])
def test_diverged_trial_is_the_worst_of_the_pruned(storage: Storage, max_epochs: int) -> None:
    """Values are drawn as if it had never validated an epoch, from the trials of all brackets."""
    train = TRAIN.model_copy(update={"max_epochs": max_epochs})
    drawn, space = [], distributions(TUNE.space)
    for name, reported in {"diverged": {1: 0.9, total_epochs(train) + 1: math.nan}, "none": {}}.items():
        study = open_study(storage, name, train, TUNE, create=True)
        for number in range(12):
            rate, values = 10 ** -(1 + number / 4), reported if number % 3 == 0 else {1: number / 12}
            params = {"learning_rate": rate}
            study.add_trial(
                optuna.create_trial(
                    state=TrialState.PRUNED, params=params, distributions=space, intermediate_values=values
                )
            )
        study.pruner._try_initialization(study)  # From here on each trial has a bracket.
        drawn.append(next_trial(study, space, TUNE).params)  # type: ignore[union-attr]  # there are fewer than num_trials
    assert drawn[0] == drawn[1]


def test_trial_that_stopped_early_is_not_pruned(study: optuna.Study) -> None:
    """Early stopping is the last event of a trial, although epochs remain: pruning would interrupt its final test."""
    for number, value in {0: 0.5, 1: 0.4}.items():
        study.ask({})
        make_reporter(get_trial(study, number))({"epoch": 1, "ends_training": number == 1, "value": value})


def test_hyperband_allocates_the_epochs_of_all_phases(storage: Storage) -> None:
    """Hyperband's maximum resource is the sum over phases; the first phase alone would give too few brackets."""
    phases = [FineTunePhase(unfreeze_from="layer4", max_epochs=5), FineTunePhase(unfreeze_from="all", max_epochs=2)]
    train = TrainConfig(recipe="given", max_epochs=2, fine_tune=phases)

    pruner = open_study(storage, "phases", train, TUNE, create=True).pruner

    assert pruner._max_resource == 9


def test_process_of_a_lost_trial_ends_with_its_next_report(study: optuna.Study) -> None:
    """A surviving process of a requeued trial gets an error, and no epoch is reported twice."""
    study.ask({})
    on_event = make_reporter(get_trial(study, 0))
    on_event({"epoch": 1, "ends_training": False, "value": 0.5})
    on_event({"epoch": 1, "ends_training": False, "value": 0.7})
    assert study.trials[0].intermediate_values == {1: 0.5}
    requeue_lost_trials(study)

    with pytest.raises(WrongInput, match="trial 0 of the study 'study' was ended"):
        on_event({"epoch": 2, "ends_training": True, "value": 0.5})
    fail_trial(study, 0, "late")
    assert trial_rows(study)[0]["error"] is None


def test_study_of_an_older_release_stays_in_its_database(storage: Storage) -> None:
    """Its trials count, and other searches of the home get a journal that only its owner may read."""
    folder = Path(storage.home) / "studies"
    folder.mkdir(parents=True)
    old = optuna.create_study(storage=f"sqlite:///{folder / 'studies.db'}", study_name="old", direction="maximize")
    run_trials(old, TUNE.model_copy(update={"num_trials": 3}), Trials(old).start, poll_seconds=0)

    found = open_study(storage, "old", TRAIN, TUNE, create=True)
    assert drawn_rates(found) == drawn_rates(old)
    open_study(storage, "new", TRAIN, TUNE, create=True)
    assert optuna.get_all_study_names(f"sqlite:///{folder / 'studies.db'}") == ["old"]
    assert [(path.name, path.stat().st_mode & 0o777) for path in folder.glob("*.journal")] == [("new.journal", 0o600)]


def test_study_survives_the_kill_of_its_writer(storage: Storage, study: optuna.Study) -> None:
    """A part of a line, as a killed process or a full disk leaves it, is removed before the next one is written."""
    study.ask({})
    journal = Path(storage.home) / "studies" / "study.journal"
    with journal.open("a") as file:
        file.write('{"op_code":6,"worker')
    study.tell(0, 0.5)
    again = open_study(storage, "study", TRAIN, TUNE, create=False)
    assert [trial.value for trial in again.trials] == [0.5]


def test_missing_study_or_trial_raises_an_error(storage: Storage, study: optuna.Study) -> None:
    """A worker with another home gets an error, and creates no study of its own."""
    with pytest.raises(WrongInput, match="study is 'none', .* '.*studies': the worker"):
        open_study(storage, "none", TRAIN, TUNE, create=False)
    with pytest.raises(WrongInput, match="number is 7, but the study 'study'"):
        get_trial(study, 7)


def test_concurrent_trials_share_the_cores(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the number of trials at once; its launcher takes a GPU, so that an ended trial's one is used again."""
    shares: dict[int, tuple[Slot | None, int]] = {}

    def run(spec: TrainingSpec, _study: str, number: int, _tune: TuneConfig, _stop: threading.Event) -> None:
        shares[number] = (spec.slot, spec.num_slots)

    monkeypatch.setattr("tasks.tune.search.run_trial", run)
    spec = TrainingSpec(train=TRAIN, distributed=None, cache=CacheRef(url="cache", digest="digest"), storage=storage)
    start_trial = partial(TrialThread, num_slots=2)
    running = [start_trial(TrialStart(spec, "study", number, TUNE, "parent")) for number in (0, 1)]
    while not all(trial.poll() for trial in running):
        time.sleep(0.01)
    assert shares == {0: (None, 2), 1: (None, 2)}


def test_all_trials_in_place_are_cancelled_before_the_first_join(
    storage: Storage, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial ends only after all are cancelled, which would never happen with a join after each cancel."""
    all_cancelled = threading.Barrier(3)

    def run(_spec: TrainingSpec, _study: str, number: int, _tune: TuneConfig, stop: threading.Event) -> None:
        if number == 0:
            raise WrongInput("a sentence")
        stop.wait()
        all_cancelled.wait(30)

    monkeypatch.setattr("tasks.tune.search.run_trial", run)
    spec = TrainingSpec(train=TRAIN, distributed=None, cache=CacheRef(url="cache", digest="digest"), storage=storage)
    start_trial = partial(TrialThread, num_slots=4)
    with pytest.raises(WrongInput, match="a sentence"):
        run_trials(
            study,
            TUNE.model_copy(update={"parallel": 4}),
            lambda number, _values: start_trial(TrialStart(spec, "study", number, TUNE, "parent")),
            poll_seconds=0,
        )
    assert not all_cancelled.broken
