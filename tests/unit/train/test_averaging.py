"""The moving average of the weights, and its place in the training loop."""

import pytest
import torch
from torch import nn

from tasks.refs import TRAIN, VAL
from tasks.train.loop import fit
from tasks.train.step import StepSettings, WeightAverage
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import TensorLoader, linear, loop_of, new_progress, separable, steps_of


def test_average_follows_the_formula_with_faster_first_steps() -> None:
    """Each step keeps the decay's share, and (1 + n) / (10 + n) of it while that is less."""
    model, average = nn.Linear(1, 1, bias=False), {}
    nn.init.constant_(model.weight, 1.0)
    averaged = WeightAverage(model, 0.2, average)
    expected = 1.0
    for step, weight in enumerate([2.0, 4.0, 8.0]):
        nn.init.constant_(model.weight, weight)
        averaged.update(step)
        decay = min(0.2, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
        assert average["weight"].item() == pytest.approx(expected)


def test_model_gets_its_own_weights_back_in_every_bit() -> None:
    """Within the context the model has the average; an exception ends it like any other way out."""
    model, average = linear(), {}
    averaged = WeightAverage(model, 0.5, average)
    with torch.no_grad():
        model.weight.mul_(1.7)
    averaged.update(0)
    own = model.weight.detach().clone()

    with averaged.in_place():
        assert torch.equal(model.weight, average["weight"])
        assert not torch.equal(model.weight, own)
    assert torch.equal(model.weight, own)

    with pytest.raises(KeyboardInterrupt), averaged.in_place():
        raise KeyboardInterrupt
    assert torch.equal(model.weight, own)


def test_frozen_weights_have_no_average() -> None:
    """An average takes the memory of the trained weights only."""
    model, average = nn.Sequential(linear(), linear()), {}
    model[0].requires_grad_(False)
    WeightAverage(model, 0.5, average)
    assert set(average) == {"1.weight", "1.bias"}


def test_best_weights_are_the_validated_average() -> None:
    """The weights are trained as without an average, and those of the best epoch are averaged."""
    inputs, labels = separable(30)
    finished = {}
    for decay in (None, 0.9):
        model, progress, trained = linear(), new_progress(9), []
        averaged = None if decay is None else WeightAverage(model, decay, progress.average)
        loader = TensorLoader(inputs, labels, steps_of(30, 8))
        loop = loop_of(lambda step: 0.1, max_epochs=3, average=averaged)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        fit(
            model, {TRAIN: loader, VAL: loader}, optimizer, loop, progress,
            lambda metrics, now, model=model, trained=trained: trained.append(model.weight.detach().clone()),
        )  # fmt: skip
        finished[decay] = model, progress, trained

    assert all(torch.equal(one, other) for one, other in zip(finished[None][2], finished[0.9][2], strict=True))
    model, progress, trained = finished[0.9]
    assert torch.equal(model.weight, progress.best_state["weight"])
    assert not any(torch.equal(model.weight, own) for own in trained)
    assert [metrics.train_loss for metrics in progress.history] == [
        metrics.train_loss for metrics in finished[None][1].history
    ]


def test_ranks_have_the_same_average() -> None:
    """The average of ranks is that of their common weights."""
    inputs, labels = separable(16)
    models = [linear(), linear()]

    def rank_main(reducer: ThreadReducer) -> dict[str, torch.Tensor]:
        model, progress = models[reducer.rank], new_progress(9)
        share = TensorLoader(inputs, labels, [list(range(reducer.rank * 8, reducer.rank * 8 + 8))], [16])
        loop = loop_of(
            lambda step: 0.1, reducer, StepSettings(), max_epochs=2,
            average=WeightAverage(model, 0.9, progress.average),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        fit(model, {TRAIN: share, VAL: share}, optimizer, loop, progress, lambda metrics, now: None)
        return progress.average

    first, second = ThreadRanks(2).run(rank_main)
    assert first.keys() == second.keys() == {"weight", "bias"}
    assert all(torch.equal(first[name], second[name]) for name in first)
