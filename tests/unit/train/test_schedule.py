"""Learning rates over the steps of a run."""

import numpy as np
import pytest
import torch

from tasks.config.recipe import PhaseTrain
from tasks.train.progress import EarlyStopping
from tasks.train.schedule import Schedule, count_plateaus, make_schedule, warmup_length


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (1, 0.175), (2, 0.25), (3, 0.325), (4, 0.4), (5, 0.4), (1_000, 0.4)]
)
def test_constant_rate_rises_linearly_in_the_warmup(step: int, rate: float) -> None:
    """The rate rises from 0.1 to 0.4 in four steps of warm-up and then stays."""
    schedule = Schedule(start=0.1, peak=0.4, warmup_steps=4, total_steps=20, kind="constant")

    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (4, 0.4), (8, 0.2), (12, 0.0), (13, 0.0)])
def test_cosine_falls_to_zero_at_the_last_step(step: int, rate: float) -> None:
    """The cosine starts at the peak after the warm-up, is half of it in the middle, and stays 0 after the end."""
    schedule = Schedule(start=0.1, peak=0.4, warmup_steps=4, total_steps=12, kind="cosine")

    assert schedule(step) == pytest.approx(rate)


def test_warmup_may_be_longer_than_the_run() -> None:
    """If the warm-up is longer than the run, the rate still rises at its end."""
    schedule = Schedule(start=0.1, peak=0.4, warmup_steps=20, total_steps=10, kind="cosine")

    assert schedule(10) == pytest.approx(0.25)
    assert schedule(20) == pytest.approx(0.4)


def test_rate_starts_at_the_peak_without_warmup() -> None:
    """With zero warm-up steps the first rate is the peak."""
    assert Schedule(0.1, 0.4, warmup_steps=0, total_steps=10, kind="cosine")(0) == 0.4


@pytest.mark.parametrize(
    ("optimizer", "rule", "factor"),
    [("sgd", "auto", 64), ("adam", "auto", 8), ("adamw", "auto", 8), ("adam", "linear", 64), ("sgd", "none", 1)],
)
def test_rate_of_many_ranks_follows_the_rule_of_the_optimizer(optimizer: str, rule: str, factor: float) -> None:
    """For 64 ranks of 32 images the rate is 64 times as high with SGD, and 8 times with Adam."""
    train = PhaseTrain(optimizer=optimizer, scale_learning_rate=rule, schedule="constant", learning_rate=0.001)

    rate = make_schedule(train, 64 * 32, steps_per_epoch=10)

    assert rate(0) == pytest.approx(0.001)
    assert rate(199) == pytest.approx(0.001 * factor)


@pytest.mark.parametrize(("reference", "peak"), [(32, 0.2), (128, 0.1), (512, 0.05)])
def test_rate_is_that_of_the_reference_batch(reference: int, peak: float) -> None:
    """The rate is unscaled for the reference batch, lower for a smaller batch, and higher for a larger one."""
    train = PhaseTrain(reference_batch_size=reference, schedule="constant", learning_rate=0.1)
    assert make_schedule(train, 128, 10)(199) == pytest.approx(peak)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "one_cycle"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_reference_batch_has_the_rate_of_no_scaling(schedule: str, optimizer: str) -> None:
    """By default the reference batch has exactly the configured rate, and no warm-up."""
    train = PhaseTrain(schedule=schedule, optimizer=optimizer, max_epochs=3)
    scaled, unscaled = (
        make_schedule(train.model_copy(update={"scale_learning_rate": rule}), 32, 10) for rule in ("auto", "none")
    )

    assert [scaled(step) for step in range(30)] == [unscaled(step) for step in range(30)]
    assert warmup_length(train, 32) == 0.0


def test_single_process_starts_at_the_configured_rate() -> None:
    """A single process has no warm-up by default."""
    constant = make_schedule(PhaseTrain(learning_rate=0.1, schedule="constant"), 32, steps_per_epoch=10)
    cosine = make_schedule(PhaseTrain(learning_rate=0.1, max_epochs=4), 32, steps_per_epoch=10)

    assert {constant(step) for step in (0, 5, 500)} == {0.1}
    assert [cosine(step) for step in (0, 20, 40)] == pytest.approx([0.1, 0.05, 0.0])


@pytest.mark.parametrize("total_steps", [20, 137])
def test_one_cycle_equals_that_of_torch(total_steps: int) -> None:
    """Each step has the rate of torch's OneCycleLR with default arguments, whatever the warm-up."""
    rate = Schedule(start=0.1, peak=0.4, warmup_steps=9, total_steps=total_steps, kind="one_cycle")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=total_steps)
    for step in range(total_steps):
        assert rate(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        if step < total_steps - 1:
            optimizer.step()
            reference.step()


@pytest.mark.parametrize("total_steps", [1, 2, 3, 5])
def test_one_cycle_of_few_steps_stays_within_its_bounds(total_steps: int) -> None:
    """For one to five steps, all rates are positive and at most the peak."""
    rate = Schedule(start=0.1, peak=0.4, warmup_steps=0, total_steps=total_steps, kind="one_cycle")
    assert all(0.0 < rate(step) <= 0.4 for step in range(total_steps))


def test_plateaus_are_counted_per_epochs_without_improvement() -> None:
    """Two epochs without improvement make one plateau; an improvement resets the count, NaN does not."""
    values = [0.5, 0.6, 0.6, 0.59, 0.7, float("nan"), 0.7, 0.7, 0.69]
    assert [count_plateaus(values[:seen], 2, higher_is_better=True) for seen in range(len(values) + 1)] == [
        0, 0, 0, 0, 1, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert count_plateaus([0.5, 0.4, 0.4, 0.5], 2, higher_is_better=False) == 1


@pytest.mark.parametrize("seed", range(5))
def test_rate_of_a_later_phase_falls_before_early_stopping(seed: int) -> None:
    """Plateaus and early stopping both compare with the best of all phases, so that the rate falls first."""
    values = [0.9, 0.8, *(np.random.default_rng(seed).uniform(0.5, 0.95, size=40).tolist())]
    train = PhaseTrain(schedule="plateau", plateau_epochs=2, patience=3, learning_rate=0.1)
    stopping = EarlyStopping(patience=3, min_delta=0.0, higher_is_better=True)
    for epoch, value in enumerate(values[:2]):
        stopping.update(epoch, value)
    stopping.epochs_without_improvement = 0  # Each phase counts its own patience.

    epoch, rates = 2, []
    while not stopping.should_stop:
        rates.append(make_schedule(train, 32, 10, history=lambda seen=epoch: values[:seen], first_epoch=2)(20))
        stopping.update(epoch, values[epoch])
        epoch += 1

    assert rates[0] == 0.1
    assert rates[-1] < 0.1
    # A tenth of the rate in the last of the three epochs without improvement.
    assert rates[-1] == pytest.approx(rates[-2] / 10)


def test_rate_falls_to_a_tenth_on_a_plateau() -> None:
    """The rate depends only on the metrics so far, so that a resumed run has the same."""
    history = [0.5, 0.6]
    train = PhaseTrain(schedule="plateau", plateau_epochs=2, patience=5, learning_rate=0.1)
    rate = make_schedule(train, 32, 10, history=lambda: history)

    assert rate(20) == pytest.approx(0.1)
    history += [0.6, 0.6]
    assert rate(40) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("rule", "global_batch", "first", "peak"),
    [
        ("linear", 128, 0.1, 0.4),
        ("sqrt", 128, 0.1, 0.2),
        ("none", 128, 0.001, 0.1),
        ("linear", 32, 0.001, 0.1),
        ("linear", 8, 0.00025, 0.025),
    ],
)
def test_rate_rises_in_the_configured_warmup(rule: str, global_batch: int, first: float, peak: float) -> None:
    """A rate that is scaled up rises from the rate for 32 images, any other from a hundredth of it."""
    train = PhaseTrain(schedule="constant", scale_learning_rate=rule, warmup_epochs=2.0, learning_rate=0.1)
    rate = make_schedule(train, global_batch, 5)

    assert rate(0) == pytest.approx(first)
    assert rate(5) == pytest.approx((first + peak) / 2)
    assert rate(10) == rate(99) == pytest.approx(peak)


def test_schedule_covers_the_epochs_after_the_warmup() -> None:
    """Of five epochs, one is the warm-up, and the cosine covers four."""
    rate = make_schedule(PhaseTrain(learning_rate=0.1, max_epochs=5, warmup_epochs=1.0), 32, 10)

    assert [rate(step) for step in (0, 10, 30, 50)] == pytest.approx([0.001, 0.1, 0.05, 0.0])


@pytest.mark.parametrize(
    ("rule", "global_batch", "max_epochs", "epochs"),
    [
        ("linear", 128, 40, 5),
        ("linear", 128, 20, 5),
        ("sqrt", 128, 8, 2),
        ("none", 128, 20, 0),
        ("linear", 32, 20, 0),
        ("linear", 8, 20, 0),
    ],
)
def test_rate_that_is_scaled_up_has_a_default_warmup(
    rule: str, global_batch: int, max_epochs: int, epochs: int
) -> None:
    """The default warm-up has five epochs, at most a quarter of all; other rates have none, and 0 disables it."""
    train = PhaseTrain(schedule="constant", scale_learning_rate=rule, max_epochs=max_epochs, learning_rate=0.1)
    rate = make_schedule(train, global_batch, 10)

    rising = [step for step in range(10 * max_epochs) if rate(step) < rate(step + 1)]
    assert rising == list(range(10 * epochs))
    assert rate(0) == pytest.approx(0.1 if epochs else rate(10 * max_epochs))
    without_warmup = make_schedule(train.model_copy(update={"warmup_epochs": 0.0}), global_batch, 10)
    assert without_warmup(0) == without_warmup(99) == rate(10 * max_epochs)


def test_rate_does_not_fall_on_a_plateau_of_the_warmup() -> None:
    """Epochs of the warm-up do not count: the rate is still rising."""
    train = PhaseTrain(schedule="plateau", plateau_epochs=2, patience=5, learning_rate=0.1, warmup_epochs=2.5)
    worse = [0.6, 0.5, 0.5, 0.5, 0.5]

    rates = [make_schedule(train, 32, 10, history=lambda seen=seen: worse[:seen])(10 * seen) for seen in range(6)]

    # The epochs 0 to 2 begin in the warm-up; 3 and 4 are the first that count.
    assert rates == pytest.approx([0.001, 0.0406, 0.0802, 0.1, 0.1, 0.01])


def test_phase_has_its_own_rate_and_length() -> None:
    """The cosine starts at the rate of the phase and ends with it."""
    rate = make_schedule(PhaseTrain(learning_rate=0.01, max_epochs=4), 32, 5)

    assert rate(0) == pytest.approx(0.01)
    assert rate(10) == pytest.approx(0.005)
    assert rate(20) == pytest.approx(0.0)


def test_change_below_min_delta_counts_towards_a_plateau() -> None:
    """Plateaus use the min_delta of early stopping, which would otherwise stop before the rate falls."""
    rising = [0.5, 0.501, 0.502, 0.503]
    assert count_plateaus(rising, epochs=2, higher_is_better=True) == 0
    assert count_plateaus(rising, epochs=2, higher_is_better=True, min_delta=0.01) == 1
