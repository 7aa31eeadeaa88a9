"""The learning rate over the steps."""

import pytest
import torch

from tasks.config import DistributedConfig, TrainConfig
from tasks.train.schedule import LearningRate, count_plateaus, learning_rate


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (1, 0.175), (2, 0.25), (3, 0.325), (4, 0.4), (5, 0.4), (1_000, 0.4)]
)
def test_a_constant_rate_rises_in_a_line_and_then_stays(step: int, rate: float) -> None:
    """Four steps of warm-up lead from 0.1 to 0.4."""
    schedule = LearningRate(base=0.1, peak=0.4, warmup_steps=4, total_steps=20, schedule="constant")

    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (4, 0.4), (8, 0.2), (12, 0.0), (13, 0.0)])
def test_a_cosine_falls_to_zero_at_the_last_step(step: int, rate: float) -> None:
    """From the peak at the end of the warm-up over half of it in the middle; no rise after the end."""
    schedule = LearningRate(base=0.1, peak=0.4, warmup_steps=4, total_steps=12, schedule="cosine")

    assert schedule(step) == pytest.approx(rate)


def test_a_warmup_longer_than_the_training_is_no_division_by_zero() -> None:
    """The rate still rises when the training ends."""
    schedule = LearningRate(base=0.1, peak=0.4, warmup_steps=20, total_steps=10, schedule="cosine")

    assert schedule(10) == pytest.approx(0.25)
    assert schedule(20) == pytest.approx(0.4)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    """No warm-up steps, no division by them."""
    assert LearningRate(0.1, 0.4, warmup_steps=0, total_steps=10, schedule="cosine")(0) == 0.4


@pytest.mark.parametrize(("scale", "reached"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_rate_rises_to_its_scaled_value(scale: str, reached: float) -> None:
    """Four ranks, one and a half epochs of ten steps: the rate of one rank at first, the scaled one after 15 steps."""
    distributed = DistributedConfig(num_ranks=4, scale_learning_rate=scale, warmup_epochs=1.5)

    rate = learning_rate(TrainConfig(learning_rate=0.1, schedule="constant"), distributed, steps_an_epoch=10)

    assert rate(0) == pytest.approx(0.1)
    assert rate(15) == rate(99) == pytest.approx(reached)


def test_the_rate_of_a_single_process_starts_at_its_value() -> None:
    """Without ranks there is nothing to warm up to."""
    constant = learning_rate(TrainConfig(learning_rate=0.1, schedule="constant"), None, steps_an_epoch=10)
    cosine = learning_rate(TrainConfig(learning_rate=0.1, max_epochs=4), None, steps_an_epoch=10)

    assert {constant(step) for step in (0, 5, 500)} == {0.1}
    assert [cosine(step) for step in (0, 20, 40)] == pytest.approx([0.1, 0.05, 0.0])


@pytest.mark.parametrize("total_steps", [20, 137])
def test_one_cycle_is_that_of_torch(total_steps: int) -> None:
    """Step by step, with its default shares and factors; a warm-up of ranks is not laid over it."""
    rate = LearningRate(base=0.1, peak=0.4, warmup_steps=9, total_steps=total_steps, schedule="one_cycle")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=total_steps)
    for step in range(total_steps):
        assert rate(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        if step < total_steps - 1:
            optimizer.step()
            theirs.step()


@pytest.mark.parametrize("total_steps", [1, 2, 3, 5])
def test_one_cycle_of_a_few_steps_stays_within_its_bounds(total_steps: int) -> None:
    """A training of one step has no cycle, and no division by nothing."""
    rate = LearningRate(base=0.1, peak=0.4, warmup_steps=0, total_steps=total_steps, schedule="one_cycle")
    assert all(0.0 < rate(step) <= 0.4 for step in range(total_steps))


def test_a_plateau_is_counted_each_time_the_metric_stays() -> None:
    """Two epochs without improvement are one, four are two; an improvement begins the count anew, NaN is none."""
    values = [0.5, 0.6, 0.6, 0.59, 0.7, float("nan"), 0.7, 0.7, 0.69]
    assert [count_plateaus(values[:seen], 2, higher_is_better=True) for seen in range(len(values) + 1)] == [
        0, 0, 0, 0, 1, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert count_plateaus([0.5, 0.4, 0.4, 0.5], 2, higher_is_better=False) == 1


def test_on_a_plateau_the_rate_falls_to_a_tenth() -> None:
    """By the metrics so far alone, so that a resumed training computes the same."""
    history = [0.5, 0.6]
    train = TrainConfig(schedule="plateau", plateau_epochs=2, patience=5, learning_rate=0.1)
    rate = learning_rate(train, None, 10, history=lambda: history)

    assert rate(20) == pytest.approx(0.1)
    history += [0.6, 0.6]
    assert rate(40) == pytest.approx(0.01)


@pytest.mark.parametrize(("how", "peak"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_with_the_batch_after_a_warmup(how: str, peak: float) -> None:
    """From the rate of 32 pictures a step to that of 128 over two epochs of five steps."""
    train = TrainConfig(schedule="constant", scale_learning_rate=how, warmup_epochs=2.0, learning_rate=0.1)
    rate = learning_rate(train, None, 5, batch_size=128)

    assert rate(0) == pytest.approx(0.1)
    assert rate(10) == pytest.approx(peak)


def test_ranks_and_batch_scale_together() -> None:
    """Two ranks of 64 pictures have the rate of 128."""
    train = TrainConfig(schedule="constant", scale_learning_rate="linear", learning_rate=0.1)
    rate = learning_rate(train, DistributedConfig(num_ranks=2, warmup_epochs=1.0), 5, batch_size=64)

    assert rate(5) == pytest.approx(0.4)


def test_a_stage_has_its_own_rate_and_length() -> None:
    """The cosine ends with the stage."""
    rate = learning_rate(TrainConfig(learning_rate=0.1), None, 5, base=0.01, max_epochs=4)

    assert rate(0) == pytest.approx(0.01)
    assert rate(10) == pytest.approx(0.005)
    assert rate(20) == pytest.approx(0.0)


def test_less_than_the_least_change_is_no_improvement() -> None:
    """As early stopping sees it, which would end the training before the rate fell."""
    rising = [0.5, 0.501, 0.502, 0.503]
    assert count_plateaus(rising, epochs=2, higher_is_better=True) == 0
    assert count_plateaus(rising, epochs=2, higher_is_better=True, min_delta=0.01) == 1
