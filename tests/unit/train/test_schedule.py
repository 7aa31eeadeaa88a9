"""The learning rate over the steps."""

import numpy as np
import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.train.early_stopping import EarlyStopping
from tasks.train.schedule import LearningRate, count_plateaus, learning_rate


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (1, 0.175), (2, 0.25), (3, 0.325), (4, 0.4), (5, 0.4), (1_000, 0.4)]
)
def test_a_constant_rate_rises_in_a_line_and_then_stays(step: int, rate: float) -> None:
    """Four steps of warm-up lead from 0.1 to 0.4."""
    schedule = LearningRate(start=0.1, peak=0.4, warmup_steps=4, total_steps=20, schedule="constant")

    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (4, 0.4), (8, 0.2), (12, 0.0), (13, 0.0)])
def test_a_cosine_falls_to_zero_at_the_last_step(step: int, rate: float) -> None:
    """From the peak at the end of the warm-up over half of it in the middle; no rise after the end."""
    schedule = LearningRate(start=0.1, peak=0.4, warmup_steps=4, total_steps=12, schedule="cosine")

    assert schedule(step) == pytest.approx(rate)


def test_a_warmup_longer_than_the_training_is_no_division_by_zero() -> None:
    """The rate still rises when the training ends."""
    schedule = LearningRate(start=0.1, peak=0.4, warmup_steps=20, total_steps=10, schedule="cosine")

    assert schedule(10) == pytest.approx(0.25)
    assert schedule(20) == pytest.approx(0.4)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    """No warm-up steps, no division by them."""
    assert LearningRate(0.1, 0.4, warmup_steps=0, total_steps=10, schedule="cosine")(0) == 0.4


@pytest.mark.parametrize(("scale", "reached"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_rate_rises_to_its_scaled_value(scale: str, reached: float) -> None:
    """Four ranks, one and a half epochs of ten steps: the rate of one rank at first, the scaled one after 15 steps.

    One that ranks do not scale is there from the first step on.
    """
    distributed = DistributedConfig(num_ranks=4, scale_learning_rate=scale, warmup_epochs=1.5)

    rate = learning_rate(TrainConfig(learning_rate=0.1, schedule="constant"), distributed, steps_per_epoch=10)

    assert rate(0) == pytest.approx(0.1)
    assert rate(15) == rate(99) == pytest.approx(reached)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "one_cycle"])
def test_the_rate_of_one_rank_is_that_of_a_single_process(schedule: str) -> None:
    """It has nothing to rise to, so that no schedule begins later."""
    train = TrainConfig(schedule=schedule, max_epochs=3)
    alone, ranked = (learning_rate(train, ranks, 10) for ranks in (None, DistributedConfig(num_ranks=1)))

    assert [alone(step) for step in range(30)] == [ranked(step) for step in range(30)]


def test_the_rate_of_a_single_process_starts_at_its_value() -> None:
    """Without ranks there is nothing to warm up to."""
    constant = learning_rate(TrainConfig(learning_rate=0.1, schedule="constant"), None, steps_per_epoch=10)
    cosine = learning_rate(TrainConfig(learning_rate=0.1, max_epochs=4), None, steps_per_epoch=10)

    assert {constant(step) for step in (0, 5, 500)} == {0.1}
    assert [cosine(step) for step in (0, 20, 40)] == pytest.approx([0.1, 0.05, 0.0])


@pytest.mark.parametrize("total_steps", [20, 137])
def test_one_cycle_is_that_of_torch(total_steps: int) -> None:
    """Step by step, with its default shares and factors; a warm-up of ranks is not laid over it."""
    rate = LearningRate(start=0.1, peak=0.4, warmup_steps=9, total_steps=total_steps, schedule="one_cycle")
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
    rate = LearningRate(start=0.1, peak=0.4, warmup_steps=0, total_steps=total_steps, schedule="one_cycle")
    assert all(0.0 < rate(step) <= 0.4 for step in range(total_steps))


def test_a_plateau_is_counted_each_time_the_metric_stays() -> None:
    """Two epochs without improvement are one, four are two; an improvement begins the count anew, NaN is none."""
    values = [0.5, 0.6, 0.6, 0.59, 0.7, float("nan"), 0.7, 0.7, 0.69]
    assert [count_plateaus(values[:seen], 2, higher_is_better=True) for seen in range(len(values) + 1)] == [
        0, 0, 0, 0, 1, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert count_plateaus([0.5, 0.4, 0.4, 0.5], 2, higher_is_better=False) == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_of_a_later_stage_falls_before_early_stopping_ends_it(seed: int) -> None:
    """Both wait for something better than the best of all phases; luck in an earlier one ends nothing too soon."""
    values = [0.9, 0.8, *(np.random.default_rng(seed).uniform(0.5, 0.95, size=40).tolist())]
    train = TrainConfig(schedule="plateau", plateau_epochs=2, patience=3, learning_rate=0.1)
    stopping = EarlyStopping(patience=3, min_delta=0.0, higher_is_better=True)
    for epoch, value in enumerate(values[:2]):
        stopping.update(epoch, value)
    stopping.epochs_without_improvement = 0  # A phase counts its own patience.

    epoch, rates = 2, []
    while not stopping.should_stop:
        rates.append(learning_rate(train, None, 10, history=lambda seen=epoch: values[:seen], first_epoch=2)(20))
        stopping.update(epoch, values[epoch])
        epoch += 1

    assert rates[0] == 0.1
    assert rates[-1] < 0.1
    # A tenth of it for the last epoch of the three without improvement.
    assert rates[-1] == pytest.approx(rates[-2] / 10)


def test_on_a_plateau_the_rate_falls_to_a_tenth() -> None:
    """By the metrics so far alone, so that a resumed training computes the same."""
    history = [0.5, 0.6]
    train = TrainConfig(schedule="plateau", plateau_epochs=2, patience=5, learning_rate=0.1)
    rate = learning_rate(train, None, 10, history=lambda: history)

    assert rate(20) == pytest.approx(0.1)
    history += [0.6, 0.6]
    assert rate(40) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("how", "batch_size", "first", "peak"),
    [
        ("linear", 128, 0.1, 0.4),
        ("sqrt", 128, 0.1, 0.2),
        ("none", 128, 0.001, 0.1),
        ("linear", 32, 0.001, 0.1),
        ("linear", 8, 0.00025, 0.025),
    ],
)
def test_the_rate_rises_in_the_warmup_that_is_asked_for(how: str, batch_size: int, first: float, peak: float) -> None:
    """Two epochs of five steps: from the rate of 32 images where more scale it up, else from a hundredth."""
    train = TrainConfig(schedule="constant", scale_learning_rate=how, warmup_epochs=2.0, learning_rate=0.1)
    rate = learning_rate(train, None, 5, batch_size=batch_size)

    assert rate(0) == pytest.approx(first)
    assert rate(5) == pytest.approx((first + peak) / 2)
    assert rate(10) == rate(99) == pytest.approx(peak)


def test_after_a_warmup_the_schedule_has_the_epochs_that_are_left() -> None:
    """One of warm-up and four on the cosine."""
    rate = learning_rate(TrainConfig(learning_rate=0.1, max_epochs=5, warmup_epochs=1.0), None, 10)

    assert [rate(step) for step in (0, 10, 30, 50)] == pytest.approx([0.001, 0.1, 0.05, 0.0])


@pytest.mark.parametrize(
    ("how", "batch_size", "max_epochs", "epochs"),
    [
        ("linear", 128, 40, 5),
        ("linear", 128, 20, 5),
        ("sqrt", 128, 8, 2),
        ("none", 128, 20, 0),
        ("linear", 32, 20, 0),
        ("linear", 8, 20, 0),
    ],
)
def test_a_rate_that_is_scaled_up_has_a_warmup_unless_somebody_says_how_long(
    how: str, batch_size: int, max_epochs: int, epochs: int
) -> None:
    """Of five epochs, at most a quarter of all; one that is not has none, and none can be asked for."""
    train = TrainConfig(schedule="constant", scale_learning_rate=how, max_epochs=max_epochs, learning_rate=0.1)
    rate = learning_rate(train, None, 10, batch_size=batch_size)

    rising = [step for step in range(10 * max_epochs) if rate(step) < rate(step + 1)]
    assert rising == list(range(10 * epochs))
    assert rate(0) == pytest.approx(0.1 if epochs else rate(10 * max_epochs))
    none = learning_rate(train.model_copy(update={"warmup_epochs": 0.0}), None, 10, batch_size=batch_size)
    assert none(0) == none(99) == rate(10 * max_epochs)


def test_ranks_and_batch_scale_together() -> None:
    """Two ranks of 64 images have the rate of 128; of the two warm-ups the longer one counts."""
    train = TrainConfig(schedule="constant", scale_learning_rate="linear", learning_rate=0.1)
    for asked, epochs in ((None, 5), (0.0, 1), (3.0, 3)):
        settings = train.model_copy(update={"warmup_epochs": asked})
        rate = learning_rate(settings, DistributedConfig(num_ranks=2, warmup_epochs=1.0), 5, batch_size=64)

        assert rate(0) == pytest.approx(0.1)
        assert rate(5 * epochs - 1) < rate(5 * epochs) == pytest.approx(0.4)


def test_a_stage_has_its_own_rate_and_length() -> None:
    """The cosine ends with the phase."""
    rate = learning_rate(TrainConfig(learning_rate=0.1), None, 5, base=0.01, max_epochs=4)

    assert rate(0) == pytest.approx(0.01)
    assert rate(10) == pytest.approx(0.005)
    assert rate(20) == pytest.approx(0.0)


def test_less_than_the_least_change_is_no_improvement() -> None:
    """As early stopping sees it, which would end the training before the rate fell."""
    rising = [0.5, 0.501, 0.502, 0.503]
    assert count_plateaus(rising, epochs=2, higher_is_better=True) == 0
    assert count_plateaus(rising, epochs=2, higher_is_better=True, min_delta=0.01) == 1
