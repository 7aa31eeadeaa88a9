"""Checkpoints, time budget and interrupts between two steps, on one and on many ranks."""

import signal
from collections.abc import Iterator

import pytest

from tasks.collectives.reducer import Reducer
from tasks.system.signals import defer_signals, interrupt_on, shutdown_requested
from tasks.train.step_callback import StepCallback
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer


@pytest.mark.parametrize(("interval", "num_checkpoints"), [(0.0, 3), (1e9, 0)])
def test_checkpoint_is_written_after_its_interval(interval: float, num_checkpoints: int) -> None:
    """A checkpoint follows every step with an interval of 0, and no step with a long one."""
    saved: list[int] = []
    step_callback = StepCallback(
        Reducer(), lambda: saved.append(1), checkpoint_seconds=interval, seconds_left=lambda: 1.0
    )
    assert not any(step_callback.after_step() for _ in range(3))
    assert len(saved) == num_checkpoints


def test_time_budget_ends_after_the_step_that_used_it_up() -> None:
    """`after_step` returns True once no seconds are left, and not before."""
    left = [2.0, 1.0, 0.0]
    step_callback = StepCallback(Reducer(), lambda: None, checkpoint_seconds=1e9, seconds_left=lambda: left.pop(0))
    assert [step_callback.after_step() for _ in range(3)] == [False, False, True]


def test_ranks_decide_together_by_the_clock_of_rank_0() -> None:
    """Both ranks write checkpoints and end the time budget after the same step."""

    def rank_main(reducer: ThreadReducer) -> tuple[list[int], list[int]]:
        step, saved, over = 0, [], []
        step_callback = StepCallback(
            reducer,
            lambda: saved.append(step),
            # By rank 1's own clock and budget neither would happen.
            checkpoint_seconds=0.0 if reducer.rank == 0 else 1e9,
            seconds_left=lambda: 1.0 if step < 5 or reducer.rank else 0.0,
        )
        for step in range(8):  # read by the functions above
            if step_callback.after_step():
                over.append(step)
                break
        return saved, over

    first, second = ThreadRanks(2).run(rank_main)
    assert first == second
    assert first[0]
    assert first[1]
    assert first[1][0] >= 5


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt during the test."""
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("interruptible")
def test_signal_within_a_step_ends_the_process_after_it_with_a_checkpoint() -> None:
    """The interrupt follows the checkpoint after the step, and is not raised again later."""
    saved: list[int] = []
    step_callback = StepCallback(Reducer(), lambda: saved.append(1), checkpoint_seconds=1e9, seconds_left=lambda: 1.0)

    def step() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            assert not saved
            step_callback.after_step()

    with pytest.raises(KeyboardInterrupt):
        step()
    assert saved == [1]
    with defer_signals():
        assert not shutdown_requested()


@pytest.mark.usefixtures("interruptible")
def test_second_signal_is_raised_at_once() -> None:
    """A second signal raises KeyboardInterrupt within the step."""

    def step() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("the second signal was deferred")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        step()


@pytest.mark.usefixtures("interruptible")
def test_rank_ignores_all_signals_but_the_first() -> None:
    """Further signals, which the parent may send at any time, interrupt neither the step nor its checkpoint."""
    interrupt_on(signal.SIGTERM, once=True)
    saved: list[int] = []

    def save() -> None:
        signal.raise_signal(signal.SIGTERM)
        saved.append(1)

    step_callback = StepCallback(Reducer(), save, checkpoint_seconds=1e9, seconds_left=lambda: 1.0)

    def step() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            step_callback.after_step()

    with pytest.raises(KeyboardInterrupt, match="shutdown requested"):
        step()
    assert saved == [1]


@pytest.mark.usefixtures("interruptible")
def test_deferred_signal_is_raised_at_the_end() -> None:
    """The signal is raised after nested `defer_signals`, even if no callback checked for it."""
    done: list[int] = []

    def step() -> None:
        with defer_signals(), defer_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append(1)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        step()
    assert done == [1]


def test_all_ranks_shut_down_if_one_is_interrupted() -> None:
    """All ranks write a checkpoint and shut down after the same step."""

    def rank_main(reducer: Reducer) -> tuple[int, int]:
        steps: list[int] = []
        saved: list[int] = []

        class Interrupted(StepCallback):
            def _is_shutdown_requested(self) -> bool:
                return reducer.rank == 1 and len(steps) > 2

        step_callback = Interrupted(
            reducer, lambda: saved.append(len(steps)), checkpoint_seconds=1e9, seconds_left=lambda: 1.0
        )

        def train() -> None:
            while len(steps) < 50:
                steps.append(1)
                step_callback.after_step()

        with pytest.raises(KeyboardInterrupt):
            train()
        return len(steps), saved[0]

    first, second = ThreadRanks(2).run(rank_main)
    assert first == second
    assert first[0] == first[1] > 2
