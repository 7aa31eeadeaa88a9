"""The time budget of a training run, over several starts and all phases."""

from pathlib import Path

import pytest

from tasks.config.train import FineTunePhase
from tests.fakes.interrupted_training import (
    STEPS,
    CountingRank,
    Interruption,
    Workspace,
    check_resumed,
    make_workspace,
)

VALIDATION_SECONDS = 2


class Clock:
    """A stand-in for the module `time` in the training loop."""

    now = 0.0

    def perf_counter(self) -> float:
        """Return the seconds that the ranks have added."""
        return self.now

    def rank(self, interruption: Interruption | None) -> CountingRank:
        """Return a rank whose steps take 1 s and whose sums, of validations and pauses, take `VALIDATION_SECONDS`."""

        def step() -> None:
            self.now += 1

        def reduce() -> None:
            self.now += VALIDATION_SECONDS

        return CountingRank(interruption, step, reduce)


@pytest.fixture
def workspace(tmp_path: Path, empty_tracking: Path) -> Workspace:
    """Return the workspace of both training runs."""
    return make_workspace(tmp_path, empty_tracking)


def test_time_budget_covers_all_starts_and_ends_all_phases(workspace, tmp_path, monkeypatch):
    """Steps and validations count, checkpoints and lost steps do not; the unfinished epoch is validated."""
    clock = Clock()
    monkeypatch.setattr("tasks.train.loop.time", clock)
    epoch = STEPS + VALIDATION_SECONDS
    train = workspace.settings(
        max_epochs=6, max_seconds=2 * epoch + 3, fine_tune=[FineTunePhase(unfreeze_from="conv5", max_epochs=2)]
    )
    interruptions = [
        Interruption("terminated", STEPS + 3, leaves=(0, 1, 18)),
        Interruption("killed", 5 + 2, leaves=(0, 2, 0), repeated=2),
        Interruption("terminated in validation", 3, leaves=(0, 2, 18)),
    ]
    _run, uninterrupted = check_resumed(workspace, train, interruptions, tmp_path, clock.rank)

    # Two epochs and three steps: the rest of the first phase and all of the second are left out.
    assert (uninterrupted.steps, uninterrupted.epochs) == (2 * STEPS + 3, [0, 1, 2])
