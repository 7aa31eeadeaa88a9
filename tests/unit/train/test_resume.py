"""A training that was killed after any step and started again is one that was never stopped."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.system.signals import interrupt_on
from tests.fakes.small_training import (
    MAX_EPOCHS,
    NUM_STEPS,
    Killed,
    Training,
    assert_same,
    kill_at,
    same_tensors,
)

LAST = (MAX_EPOCHS - 1, NUM_STEPS - 1)


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (0, 3), (1, 5), (2, 1), LAST])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_killed_after_a_step_and_resumed_is_never_stopped(
    tmp_path: Path, optimizer: str, epoch: int, step: int
) -> None:
    """Weights, batch norm statistics, optimizer and metrics are equal bit for bit, dropout and shuffling included."""
    unbroken = Training(tmp_path / "unbroken", optimizer)
    unbroken.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", optimizer).run(kill_at(epoch, step))

    resumed = Training(tmp_path / "killed", optimizer)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert_same(resumed, unbroken)
    # It went on with the batch after the last step that a checkpoint covers.
    assert seen[:1] == ([divmod(epoch * NUM_STEPS + step + 1, NUM_STEPS)] if (epoch, step) != LAST else [])


def test_a_checkpoint_between_epochs_alone_repeats_the_epoch_and_ends_the_same(tmp_path: Path) -> None:
    """What was trained after the last checkpoint is trained again, and counts once."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", checkpoint_seconds=1e9).run(kill_at(2, 4))

    resumed = Training(tmp_path / "killed", checkpoint_seconds=1e9)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert seen[0] == (2, 0)
    assert_same(resumed, unbroken)


def test_killed_again_and_again_still_ends_the_same(tmp_path: Path) -> None:
    """Two steps a process give what one process gives."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()
    for number in range(1, len(unbroken.progress.history) * NUM_STEPS, 2):
        with pytest.raises(Killed):
            Training(tmp_path / "killed").run(kill_at(*divmod(number, NUM_STEPS)))

    last = Training(tmp_path / "killed")
    last.run()

    assert_same(last, unbroken)


def test_sigterm_ends_the_step_writes_a_checkpoint_and_leaves(tmp_path: Path) -> None:
    """Whatever the time since the last one; resumed, it is a training that was never stopped."""
    unbroken = Training(tmp_path / "unbroken")
    unbroken.run()

    def ask_to_leave(epoch: int, step: int) -> None:
        if (epoch, step) == (1, 2):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            Training(tmp_path / "left", checkpoint_seconds=1e9).run(ask_to_leave)
    finally:
        signal.signal(signal.SIGTERM, before)

    resumed = Training(tmp_path / "left")
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))
    # Asked while the batch of step 3 was fetched: that step is whole.
    assert seen[0] == (1, 4)
    assert_same(resumed, unbroken)


def test_a_used_up_budget_ends_the_epoch_and_validates_it(tmp_path: Path) -> None:
    """What it learned so far is measured and kept, and run again it trains no more."""
    training = Training(tmp_path, budget=NUM_STEPS + 2)
    steps: list[tuple[int, int]] = []
    training.run(lambda *now: steps.append(now))

    assert [metrics.epoch for metrics in training.progress.history] == [0, 1]
    assert steps[-1] == (1, 0)  # The batch of step 1 was the last that was asked for.

    again = Training(tmp_path, budget=NUM_STEPS + 2)
    again.run(kill_at(1, 0))
    assert len(again.progress.history) == 2
    assert same_tensors(again.model.state_dict(), training.model.state_dict())


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_killed_in_the_validation_after_the_budget_it_is_validated_when_resumed(
    tmp_path: Path, checkpoint_seconds: float
) -> None:
    """The epoch counts that was cut short, be it the first one; asked to leave in its validation it is saved."""
    for budget, validation in ((2, 1), (NUM_STEPS + 2, 2)):
        options = {"budget": budget, "checkpoint_seconds": checkpoint_seconds}
        unbroken = Training(tmp_path / f"unbroken-{budget}", **options)
        unbroken.run()
        began = iter(range(1, 10))

        def kill(_epoch: int, step: int, began: Iterator[int] = began, validation: int = validation) -> None:
            if step == 0 and next(began) == validation:
                raise Killed

        with pytest.raises(Killed):
            Training(tmp_path / f"killed-{budget}", **options).run(after_validated_batch=kill)

        resumed = Training(tmp_path / f"killed-{budget}", **options)
        resumed.run()
        assert_same(resumed, unbroken)
