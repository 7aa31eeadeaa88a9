"""The search on a real study, with trials that end when they are told to."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tasks.config.train import FineTunePhase, TrainConfig
from tasks.config.tune import Range, TuneConfig
from tasks.errors import SubmittedRunCancelled, WrongInput
from tasks.launch.spec import RankSpec
from tasks.refs import CacheRef
from tasks.storage import Storage
from tasks.tune.search import RunningTrial, TrialStart, TrialThreads, run_trials
from tasks.tune.study import NoTrialCompleted, best_trial, counted_trials, open_study, redo_lost_trials, trial_rows
from tasks.tune.trial import Pruned, fail_trial, reporter, trial_of

# With two epochs Hyperband has one bracket, so that a trial's number decides nothing.
TRAIN = TrainConfig(weights="none", freeze_backbone=False, max_epochs=2)
TUNE = TuneConfig(search={"learning_rate": Range(low=1e-4, high=1e-1, log=True)}, num_trials=14)


@pytest.fixture
def study(storage: Storage) -> optuna.Study:
    """Return a study in a database of its own."""
    return open_study(storage, "study", TRAIN, TUNE, create=True)


def quality(values: dict[str, Any]) -> float:
    """Return how good a learning rate is: 0.01 is best."""
    return 1 - abs(math.log10(values["learning_rate"]) + 2) / 4


class Trials:
    """Trials that run for so many looks, and then tell the study how good their learning rate is."""

    def __init__(self, study: optuna.Study, looks: int = 1, fails: Callable[[int], Exception | None] | None = None):
        self.study, self.looks, self.fails = study, looks, fails
        self.running: set[int] = set()
        self.most = 0
        self.cancelled: list[int] = []
        self.told: list[tuple[str, int]] = []

    def start(self, number: int, values: dict[str, Any]) -> RunningTrial:
        """Begin a trial."""
        self.running.add(number)
        self.most = max(self.most, len(self.running))
        return _Trial(self, number, values)


class _Trial:
    def __init__(self, trials: Trials, number: int, values: dict[str, Any]) -> None:
        self.trials, self.number, self.values, self.looks = trials, number, values, trials.looks

    def poll(self) -> bool:
        self.looks -= 1
        if self.looks > 0:
            return False
        self.trials.running.discard(self.number)
        if self.trials.fails and (error := self.trials.fails(self.number)):
            raise error
        self.trials.study.tell(self.number, quality(self.values))
        return True

    def cancel(self) -> None:
        self.trials.cancelled.append(self.number)
        self.trials.told.append(("cancel", self.number))

    def join(self) -> None:
        self.trials.told.append(("join", self.number))


def drawn(study: optuna.Study) -> list[float]:
    """Return the learning rates of the trials that count."""
    return [trial.params["learning_rate"] for trial in counted_trials(study)]


def test_a_search_draws_as_many_trials_as_it_is_to_and_gets_better(study: optuna.Study) -> None:
    """One after the other, and nothing more when it is run again."""
    trials = Trials(study)
    run_trials(study, TUNE, trials.start, look_seconds=0)
    run_trials(study, TUNE, trials.start, look_seconds=0)

    assert len(study.trials) == 14
    assert len(set(drawn(study))) == 14
    assert trials.most == 1
    assert study.best_value > 0.9


def test_a_search_that_was_stopped_draws_what_it_would_have_drawn(study: optuna.Study, storage: Storage) -> None:
    """And begins with the trial that was lost with its process."""
    run_trials(study, TUNE, Trials(study).start, look_seconds=0)

    stopped = open_study(storage, "stopped", TRAIN, TUNE, create=True)
    run_trials(stopped, TUNE.model_copy(update={"num_trials": 11}), Trials(stopped).start, look_seconds=0)
    lost = Trials(stopped, fails=lambda number: KeyboardInterrupt())  # type: ignore[arg-type, return-value]
    with pytest.raises(KeyboardInterrupt):
        run_trials(stopped, TUNE, lost.start, look_seconds=0)
    assert lost.cancelled == [11]
    again = open_study(storage, "stopped", TRAIN, TUNE, create=True)
    assert redo_lost_trials(again) == 1
    run_trials(again, TUNE, Trials(again).start, look_seconds=0)

    assert drawn(again) == drawn(study)
    assert [row["state"] for row in trial_rows(again)].count("redone") == 1
    assert [trial.state for trial in again.trials].count(TrialState.COMPLETE) == 14


def test_more_trials_add_to_a_search(study: optuna.Study) -> None:
    """Those that are there count."""
    run_trials(study, TUNE.model_copy(update={"num_trials": 3}), Trials(study).start, look_seconds=0)
    before = drawn(study)
    run_trials(study, TUNE.model_copy(update={"num_trials": 5}), Trials(study).start, look_seconds=0)

    assert drawn(study)[:3] == before
    assert len(study.trials) == 5


def test_so_many_trials_run_at_once_and_no_more(study: optuna.Study) -> None:
    """A slot that is free is filled at once."""
    trials = Trials(study, looks=3)
    run_trials(study, TUNE.model_copy(update={"parallel": 3, "num_trials": 7}), trials.start, look_seconds=0)

    assert trials.most == 3
    assert len(set(drawn(study))) == 7


def test_no_trial_begins_when_the_time_is_up(study: optuna.Study) -> None:
    """Those that run come to their end."""
    trials = Trials(study, looks=12)
    run_trials(study, TUNE.model_copy(update={"parallel": 2, "timeout_seconds": 1}), trials.start, look_seconds=0.1)

    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2


def test_a_trial_that_fails_has_no_value_and_is_done_again_by_the_next_run(study: optuna.Study) -> None:
    """The search goes on meanwhile."""
    four = TUNE.model_copy(update={"num_trials": 4})
    trials = Trials(study, fails=lambda number: RuntimeError("out of memory") if number == 1 else None)
    run_trials(study, four, trials.start, look_seconds=0)
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    assert trial_rows(study)[1]["error"] == "RuntimeError: out of memory"

    assert redo_lost_trials(study) == 1
    run_trials(study, four, Trials(study).start, look_seconds=0)

    assert study.trials[4].state == TrialState.COMPLETE
    assert study.trials[4].params == study.trials[1].params
    assert redo_lost_trials(study) == 0


def test_wrong_input_ends_the_search_and_what_runs(study: optuna.Study) -> None:
    """With the same settings it would be so again."""
    trials = Trials(study, looks=2, fails=lambda number: WrongInput("a sentence") if number == 0 else None)
    with pytest.raises(WrongInput, match="a sentence"):
        run_trials(study, TUNE.model_copy(update={"parallel": 3}), trials.start, look_seconds=0)

    assert {1, 2} <= set(trials.cancelled)
    # Each has the whole of the time that we are given: none waits for another one's end before it hears of it.
    assert [what for what, _number in trials.told] == ["cancel"] * 3 + ["join"] * 3


def test_a_trial_that_a_person_cancels_is_given_up_and_the_search_goes_on(study: optuna.Study) -> None:
    """Also where its own process, asked to end, has said before that it failed; no later run does it again."""
    four = TUNE.model_copy(update={"num_trials": 4})
    ended: list[int] = []

    def cancelled(number: int) -> Exception | None:
        if number == 2:
            fail_trial(study, number, "TerminationSignal: ")
        return SubmittedRunCancelled(f"trial {number} was cancelled") if number in {1, 2} else None

    run_trials(study, four, Trials(study, fails=cancelled).start, look_seconds=0, on_cancelled=ended.append)

    assert [row["state"] for row in trial_rows(study)] == ["complete", "cancelled", "cancelled", "complete"]
    assert ended == [1, 2]
    assert redo_lost_trials(study) == 0
    run_trials(study, four, Trials(study).start, look_seconds=0)
    assert len(study.trials) == 4


def test_a_search_without_a_completed_trial_says_what_became_of_them(study: optuna.Study) -> None:
    """As one sentence, with the last failure's reason, which is in the last line of a rank's output."""
    output = "RankFailed: rank 0 ended with status 1; its last lines:\n" + "a line\n" * 500 + "MemoryError: no room"
    study.ask({})
    study.ask({})
    study.tell(1, state=TrialState.PRUNED)
    fail_trial(study, 0, output)
    said = (
        "none of the 2 trials of the search came to its end (1 failed, 1 diverged or pruned); the last, trial 0, ended "
        "with 'RankFailed: rank 0 ended with status 1; its last lines: ... MemoryError: no room': mend that and run "
        "the search again, which does again those that failed"
    )
    with pytest.raises(NoTrialCompleted) as none:
        best_trial(study)
    assert str(none.value) == said
    # It is no reason to do all of them again at once.
    assert isinstance(none.value, WrongInput)


def test_of_trials_that_are_done_again_those_that_count_are_counted(study: optuna.Study) -> None:
    """Each once, and where none failed there is nothing that another run would do again."""
    study.ask({})
    fail_trial(study, 0, "a worker was lost")
    redo_lost_trials(study)
    with pytest.raises(
        NoTrialCompleted, match=r"none of the 1 trials of the search came to its end \(1 not begun\): m"
    ):
        best_trial(study)
    study.ask({})
    study.tell(1, state=TrialState.PRUNED)
    with pytest.raises(NoTrialCompleted, match=r"none of the 1 .* \(1 diverged or pruned\): search other values"):
        best_trial(study)


def test_a_trial_that_is_not_the_best_after_an_epoch_is_pruned(study: optuna.Study) -> None:
    """One that is goes on, and after the last epoch nobody is pruned."""
    values = {0: 0.5, 1: 0.4, 2: 0.6}
    for number, value in values.items():
        study.ask({})
        on_event = reporter(trial_of(study, number))
        with pytest.raises(Pruned) if number == 1 else nullcontext():
            on_event({"epoch": 1, "ends_training": False, "value": value})
            on_event({"epoch": 2, "ends_training": True, "value": 0.0})


def test_a_trial_that_early_stopping_has_ended_is_not_pruned(study: optuna.Study) -> None:
    """It has epochs left that it does not use: asked to leave, it would do so within its final test."""
    for number, value in {0: 0.5, 1: 0.4}.items():
        study.ask({})
        reporter(trial_of(study, number))({"epoch": 1, "ends_training": number == 1, "value": value})


def test_epochs_of_all_stages_are_what_trials_are_given_more_or_less_of(storage: Storage) -> None:
    """Of those of the first stage alone Hyperband would make too few brackets."""
    stages = [FineTunePhase(unfreeze_from="layer4", max_epochs=5), FineTunePhase(unfreeze_from="all", max_epochs=2)]
    train = TrainConfig(max_epochs=2, fine_tune=stages)

    pruner = open_study(storage, "stages", train, TUNE, create=True).pruner

    assert pruner._max_resource == 9


def test_what_is_left_of_a_lost_trial_ends_with_its_next_report(study: optuna.Study) -> None:
    """Its process lives, but another one does its work now; an epoch that was reported is not reported again."""
    study.ask({})
    on_event = reporter(trial_of(study, 0))
    on_event({"epoch": 1, "ends_training": False, "value": 0.5})
    on_event({"epoch": 1, "ends_training": False, "value": 0.7})
    assert study.trials[0].intermediate_values == {1: 0.5}
    redo_lost_trials(study)

    with pytest.raises(WrongInput, match="trial 0 of the study 'study' was ended by another run of the search"):
        on_event({"epoch": 2, "ends_training": True, "value": 0.5})
    fail_trial(study, 0, "late")
    assert trial_rows(study)[0]["error"] is None


def test_a_study_that_is_not_there_is_named(storage: Storage, study: optuna.Study) -> None:
    """A worker that sees another home would make a study that nobody reads."""
    with pytest.raises(WrongInput, match="study is 'none', which '.*studies' does not have: the worker must see"):
        open_study(storage, "none", TRAIN, TUNE, create=False)
    with pytest.raises(WrongInput, match="number is 7, but the study 'study' has no such trial"):
        trial_of(study, 7)


def test_trials_at_once_have_slots_of_their_own(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two that run share one, and one that ended leaves its slot to the next."""
    ends = {number: threading.Event() for number in range(3)}
    slots: dict[int, tuple[int, int]] = {}

    def run(spec: RankSpec, _study: str, number: int, _tune: TuneConfig, _stop: threading.Event) -> None:
        slots[number] = (spec.slot, spec.num_slots)
        ends[number].wait(30)

    monkeypatch.setattr("tasks.tune.search.run_trial", run)
    spec = RankSpec(train=TRAIN, distributed=None, cache=CacheRef(url="cache", digest="digest"), storage=storage)
    begin = TrialThreads(2)
    running = {number: begin(TrialStart(spec, "study", number, TUNE, "parent")) for number in (0, 1)}
    ends[1].set()
    while not running[1].poll():
        time.sleep(0.01)
    running[2] = begin(TrialStart(spec, "study", 2, TUNE, "parent"))
    for end in ends.values():
        end.set()
    while not all(trial.poll() for trial in running.values()):
        time.sleep(0.01)
    assert slots == {0: (0, 2), 1: (1, 2), 2: (1, 2)}


def test_trials_in_place_are_all_asked_to_end_before_one_is_waited_for(
    storage: Storage, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each ends when it knows that all were asked, which one that is waited for alone would never know."""
    asked = threading.Barrier(3)

    def run(_spec: RankSpec, _study: str, number: int, _tune: TuneConfig, stop: threading.Event) -> None:
        if number == 0:
            raise WrongInput("a sentence")
        stop.wait()
        asked.wait(30)

    monkeypatch.setattr("tasks.tune.search.run_trial", run)
    spec = RankSpec(train=TRAIN, distributed=None, cache=CacheRef(url="cache", digest="digest"), storage=storage)
    begin = TrialThreads(4)
    with pytest.raises(WrongInput, match="a sentence"):
        run_trials(
            study,
            TUNE.model_copy(update={"parallel": 4}),
            lambda number, _values: begin(TrialStart(spec, "study", number, TUNE, "parent")),
            look_seconds=0,
        )
    assert not asked.broken
