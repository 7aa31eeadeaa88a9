"""The activity of this process: what the watchdog of ranks is told of it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.progress import activity
from tasks.progress.activity import (
    current,
    expect_slow_steps,
    progressed,
    stepping,
    waiting_for_process,
    waiting_for_ranks,
    working,
)
from tests.fakes.small_training import MAX_EPOCHS, NUM_STEPS, Training


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin with the activity of a new process, and leave none behind."""
    before = current()
    monkeypatch.setattr(activity._State, "current", activity.Activity("starting", "start"))
    yield
    monkeypatch.undo()
    assert current() == before


def test_contexts_are_nested_and_each_change_is_progress() -> None:
    """Within a context the activity is its own, and afterwards the one around it, in the epoch of the last step."""
    seen = []
    with working("preparing"):
        with stepping("training", 2) as begin_step:
            begin_step(14)
            seen.append(current())
            with waiting_for_ranks():
                seen.append(current())
            progressed()
            seen.append(current())
        with working("writing a checkpoint"):
            seen.append(current())
        with stepping("evaluating") as begin_step:
            begin_step(0)
            seen.append(current())
        with waiting_for_process("waiting for another process"):
            seen.append(current())
    assert [(one.place, one.kind) for one in seen] == [
        ("step 14 of epoch 2 (training)", "step"),
        ("step 14 of epoch 2 (training)", "ranks"),
        ("step 14 of epoch 2 (training)", "step"),
        ("'writing a checkpoint'", "work"),
        ("step 0 of epoch 2 (evaluating)", "step"),
        ("'waiting for another process'", "processes"),
    ]
    assert len({one.changes for one in seen}) == len(seen)


def test_steps_in_which_a_network_is_compiled_take_unknown_time() -> None:
    """The first epoch of a compiled network has no limit per step."""
    kinds = []
    for slow in (True, False):
        expect_slow_steps(slow=slow)
        with stepping("training", 0) as begin_step:
            begin_step(0)
            kinds.append(current().kind)
    assert kinds == ["work", "step"]


def test_other_threads_change_nothing() -> None:
    """The heartbeats of rank 0 are sent by a thread, and tell nothing of the work that takes so long."""

    def wait() -> None:
        with waiting_for_ranks():
            progressed()

    with working("logging the results"):
        before = current()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert current() == before


def test_every_step_of_a_training_run_is_reported(tmp_path: Path) -> None:
    """The activity has epoch and step of each batch, of training and of validation."""
    trained: list[str] = []
    validated: list[str] = []
    Training(tmp_path).run(
        lambda _epoch, _step: trained.append(current().place), lambda _epoch, _step: validated.append(current().place)
    )
    assert trained == [
        f"step {step} of epoch {epoch} (training)" for epoch in range(MAX_EPOCHS) for step in range(NUM_STEPS)
    ]
    assert validated == [
        f"step {step} of epoch {epoch} (evaluating)" for epoch in range(MAX_EPOCHS) for step in range(NUM_STEPS)
    ]
