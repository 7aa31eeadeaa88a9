"""Runs that are killed or interrupted at any step and resumed, compared with uninterrupted ones."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, optimizer: str, epoch: int, step: int) -> None:
    """Weights, batch norm statistics, optimizer and metrics are bit-identical, including dropout and shuffling."""
    uninterrupted = Training(tmp_path / "uninterrupted", optimizer)
    uninterrupted.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", optimizer).run(kill_at(epoch, step))

    resumed = Training(tmp_path / "killed", optimizer)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert_same(resumed, uninterrupted)
    # It resumed with the batch after the last step in the checkpoint.
    assert seen[:1] == ([divmod(epoch * NUM_STEPS + step + 1, NUM_STEPS)] if (epoch, step) != LAST else [])


@pytest.mark.parametrize("batch", range(NUM_STEPS))
@pytest.mark.parametrize("accumulate_steps", [2, 4])
def test_run_that_accumulates_resumes_at_the_first_batch_of_a_step(
    tmp_path: Path, accumulate_steps: int, batch: int
) -> None:
    """Batches whose step was not taken are trained on again, and the result is bit-identical."""
    uninterrupted = Training(tmp_path / "uninterrupted", accumulate_steps=accumulate_steps)
    uninterrupted.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", accumulate_steps=accumulate_steps).run(kill_at(1, batch))

    resumed = Training(tmp_path / "killed", accumulate_steps=accumulate_steps)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert_same(resumed, uninterrupted)
    is_taken = (batch + 1) % accumulate_steps == 0 or batch == NUM_STEPS - 1
    first = batch + 1 if is_taken else batch - batch % accumulate_steps
    assert seen[0] == divmod(NUM_STEPS + first, NUM_STEPS)


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (1, 2), (2, 5)])
def test_resumed_run_has_the_same_average_of_the_weights(tmp_path: Path, epoch: int, step: int) -> None:
    """The average of a resumed run is bit-identical, and so are the weights that are trained."""
    uninterrupted = Training(tmp_path / "uninterrupted", ema_decay=0.9)
    uninterrupted.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", ema_decay=0.9).run(kill_at(epoch, step))

    resumed = Training(tmp_path / "killed", ema_decay=0.9)
    resumed.run()

    assert resumed.progress.average
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("step", [0, NUM_STEPS - 1])
def test_run_killed_in_a_validation_of_the_average_keeps_its_own_weights(tmp_path: Path, step: int) -> None:
    """The validation uses the average, but a checkpoint that it interrupts has the weights that are trained."""
    uninterrupted = Training(tmp_path / "uninterrupted", ema_decay=0.9)
    uninterrupted.run()

    def kill(_epoch: int, validated: int) -> None:
        if validated == step:
            raise Killed

    killed = Training(tmp_path / "killed", ema_decay=0.9)
    with pytest.raises(Killed):
        killed.run(after_validated_batch=kill)
    weight = killed.model[0].weight
    assert not torch.equal(weight, killed.progress.average["0.weight"])

    resumed = Training(tmp_path / "killed", ema_decay=0.9)
    resumed.run()
    assert_same(resumed, uninterrupted)


def test_run_resumed_from_a_checkpoint_between_epochs_equals_uninterrupted_run(tmp_path: Path) -> None:
    """Steps after the last checkpoint are repeated, and their metrics count once."""
    uninterrupted = Training(tmp_path / "uninterrupted")
    uninterrupted.run()
    with pytest.raises(Killed):
        Training(tmp_path / "killed", checkpoint_seconds=1e9).run(kill_at(2, 4))

    resumed = Training(tmp_path / "killed", checkpoint_seconds=1e9)
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))

    assert seen[0] == (2, 0)
    assert_same(resumed, uninterrupted)


def test_run_killed_repeatedly_equals_uninterrupted_run(tmp_path: Path) -> None:
    """Processes that train for two steps each give the result of a single process."""
    uninterrupted = Training(tmp_path / "uninterrupted")
    uninterrupted.run()
    for number in range(1, len(uninterrupted.progress.history) * NUM_STEPS, 2):
        with pytest.raises(Killed):
            Training(tmp_path / "killed").run(kill_at(*divmod(number, NUM_STEPS)))

    last = Training(tmp_path / "killed")
    last.run()

    assert_same(last, uninterrupted)


def test_sigterm_completes_the_step_and_writes_a_checkpoint(tmp_path: Path) -> None:
    """SIGTERM writes a checkpoint outside the interval, from which the resumed run equals an uninterrupted one."""
    uninterrupted = Training(tmp_path / "uninterrupted")
    uninterrupted.run()

    def send_sigterm(epoch: int, step: int) -> None:
        if (epoch, step) == (1, 2):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            Training(tmp_path / "interrupted", checkpoint_seconds=1e9).run(send_sigterm)
    finally:
        signal.signal(signal.SIGTERM, before)

    resumed = Training(tmp_path / "interrupted")
    seen: list[tuple[int, int]] = []
    resumed.run(lambda *now: seen.append(now))
    # SIGTERM came while the batch of step 3 was loaded, so step 3 was completed.
    assert seen[0] == (1, 4)
    assert_same(resumed, uninterrupted)


def test_time_budget_ends_the_epoch_with_a_validation(tmp_path: Path) -> None:
    """The interrupted epoch is validated and kept, and the same run trains no further step."""
    training = Training(tmp_path, budget=NUM_STEPS + 2)
    steps: list[tuple[int, int]] = []
    training.run(lambda *now: steps.append(now))

    assert [metrics.epoch for metrics in training.progress.history] == [0, 1]
    assert steps[-1] == (1, 0)  # The batch of step 1 was the last one loaded.

    again = Training(tmp_path, budget=NUM_STEPS + 2)
    again.run(kill_at(1, 0))
    assert len(again.progress.history) == 2
    assert same_tensors(again.model.state_dict(), training.model.state_dict())


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_run_killed_in_the_last_validation_is_validated_when_resumed(tmp_path: Path, checkpoint_seconds: float) -> None:
    """An epoch that the time budget cut short, even the first one, is validated when the run is resumed."""
    for budget, validation in ((2, 1), (NUM_STEPS + 2, 2)):
        options = {"budget": budget, "checkpoint_seconds": checkpoint_seconds}
        uninterrupted = Training(tmp_path / f"uninterrupted-{budget}", **options)
        uninterrupted.run()
        began = iter(range(1, 10))

        def kill(_epoch: int, step: int, began: Iterator[int] = began, validation: int = validation) -> None:
            if step == 0 and next(began) == validation:
                raise Killed

        with pytest.raises(Killed):
            Training(tmp_path / f"killed-{budget}", **options).run(after_validated_batch=kill)

        resumed = Training(tmp_path / f"killed-{budget}", **options)
        resumed.run()
        assert_same(resumed, uninterrupted)
