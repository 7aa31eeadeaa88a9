"""What happens between two steps, on one rank and on many."""

import signal
from collections.abc import Iterator

import pytest

from tasks.collectives import Reducer, SingleProcess
from tasks.system.signals import defer_signals, interrupt_on, shutdown_requested
from tasks.train.step_callback import StepCallback
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer


@pytest.mark.parametrize(("interval", "wanted"), [(0.0, 3), (1e9, 0)])
def test_a_checkpoint_is_written_when_its_time_has_come(interval: float, wanted: int) -> None:
    """After every step with an interval of nothing, after none with a long one."""
    saved: list[int] = []
    step_callback = StepCallback(
        SingleProcess(), lambda: saved.append(1), checkpoint_seconds=interval, seconds_left=lambda: 1.0
    )
    assert not any(step_callback.after_step() for _ in range(3))
    assert len(saved) == wanted


def test_the_budget_ends_after_the_step_that_used_it_up() -> None:
    """Neither before nor later."""
    left = [2.0, 1.0, 0.0]
    step_callback = StepCallback(
        SingleProcess(), lambda: None, checkpoint_seconds=1e9, seconds_left=lambda: left.pop(0)
    )
    assert [step_callback.after_step() for _ in range(3)] == [False, False, True]


def test_ranks_decide_alike_by_the_clock_of_rank_0() -> None:
    """Saving, and the end of the budget, come after the same step on both."""

    def rank_main(reducer: ThreadReducer) -> tuple[list[int], list[int]]:
        step, saved, over = 0, [], []
        step_callback = StepCallback(
            reducer,
            lambda: saved.append(step),
            # Rank 1's own clock and budget would never say so.
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
    """Let SIGTERM interrupt."""
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_within_a_step_is_heard_after_it_and_saved_before_it_ends_the_process() -> None:
    """What came once is not held for later."""
    saved: list[int] = []
    step_callback = StepCallback(
        SingleProcess(), lambda: saved.append(1), checkpoint_seconds=1e9, seconds_left=lambda: 1.0
    )

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
def test_a_second_signal_does_not_wait() -> None:
    """Who asks twice wants it now."""

    def step() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("the second one waited")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        step()


@pytest.mark.usefixtures("interruptible")
def test_a_rank_hears_the_first_signal_alone() -> None:
    """Within a step, and while it writes the checkpoint of it; its parent may ask again at any moment."""
    interrupt_on(signal.SIGTERM, once=True)
    saved: list[int] = []

    def save() -> None:
        signal.raise_signal(signal.SIGTERM)
        saved.append(1)

    step_callback = StepCallback(SingleProcess(), save, checkpoint_seconds=1e9, seconds_left=lambda: 1.0)

    def step() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            step_callback.after_step()

    with pytest.raises(KeyboardInterrupt, match="asked to leave"):
        step()
    assert saved == [1]


@pytest.mark.usefixtures("interruptible")
def test_what_is_held_back_comes_at_the_end() -> None:
    """Also where nobody asked for it in between."""
    done: list[int] = []

    def step() -> None:
        with defer_signals(), defer_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append(1)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        step()
    assert done == [1]


def test_one_rank_that_is_asked_to_leave_takes_the_others_along() -> None:
    """All write the same checkpoint and leave after the same step."""

    def rank_main(reducer: Reducer) -> tuple[int, int]:
        steps: list[int] = []
        saved: list[int] = []

        class Asked(StepCallback):
            def _wants_to_leave(self) -> bool:
                return reducer.rank == 1 and len(steps) > 2

        step_callback = Asked(
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
