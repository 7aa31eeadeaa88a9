"""A training's budget of seconds: what counts, over how many starts, and what ends with it."""

from pathlib import Path

import pytest

from tasks.config.train import FineTunePhase
from tests.fakes.interrupted_training import (
    STEPS,
    CountingRank,
    Ground,
    Interruption,
    check_resumed,
    make_ground,
)

VALIDATION_SECONDS = 2

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


class Clock:
    """Stands for the module `time` in the training loop."""

    now = 0.0

    def perf_counter(self) -> float:
        """Return the seconds that the trainings have told it."""
        return self.now

    def rank(self, interruption: Interruption | None) -> CountingRank:
        """Return a rank whose steps take a second each, and its sums two: that of a validation, and those of pauses."""

        def step() -> None:
            self.now += 1

        def reduce() -> None:
            self.now += VALIDATION_SECONDS

        return CountingRank(interruption, step, reduce)


@pytest.fixture
def ground(tmp_path: Path, empty_tracking: Path) -> Ground:
    """Return what both trainings share."""
    return make_ground(tmp_path, empty_tracking)


def test_a_budget_of_seconds_is_one_over_all_starts_and_the_end_of_all_stages(ground, tmp_path, monkeypatch):
    """Steps and validations count, checkpoints and what was lost do not; the epoch that was cut short is validated."""
    clock = Clock()
    monkeypatch.setattr("tasks.train.loop.time", clock)
    epoch = STEPS + VALIDATION_SECONDS
    train = ground.settings(
        max_epochs=6, max_seconds=2 * epoch + 3, fine_tune=[FineTunePhase(unfreeze_from="conv5", max_epochs=2)]
    )
    interruptions = [
        Interruption("asked", STEPS + 3, leaves=(0, 1, 18)),
        Interruption("killed", 5 + 2, leaves=(0, 2, 0), repeated=2),
        Interruption("asked in validation", 3, leaves=(0, 2, 18)),
    ]
    _run, unbroken = check_resumed(ground, train, interruptions, tmp_path, clock.rank)

    # Two epochs and three steps; neither the rest of the first stage nor anything of the second.
    assert (unbroken.steps, unbroken.epochs) == (2 * STEPS + 3, [0, 1, 2])
