"""Losses, inputs and gradients that are no numbers: the training ends at once and says where."""

import math

import pytest
import torch
from torch import nn

from tasks.errors import Diverged
from tasks.train import non_finite
from tasks.train.loop import train_one_epoch
from tasks.train.step import StepSettings
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import (
    NUM_CLASSES,
    Recorder,
    TensorLoader,
    fit_simply,
    linear,
    loop_of,
    new_progress,
    separable,
    steps_of,
)


@pytest.mark.parametrize(("weight", "bias", "loss"), [(float("nan"), 0.0, "nan"), (0.0, -float("inf"), "inf")])
def test_loss_that_is_no_number_ends_the_step_and_names_the_layer(weight: float, bias: float, loss: str) -> None:
    """Also where it is infinite; the rows of the step are told, of which the caller knows the images."""
    inputs, labels = separable(6)
    model = nn.Sequential(nn.ReLU(), linear())
    with torch.no_grad():
        model[1].weight[0] = weight
        model[1].bias[0] = bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(inputs, labels, [[3, 0, 4], [1, 2, 5]])
    why = "weight" if math.isnan(weight) else "bias"

    with pytest.raises(Diverged) as diverged:
        train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 3)

    assert f"the training loss of epoch 3, step 0 is {loss}" in str(diverged.value)
    assert f"the layer '1' (its {why} are no numbers)" in str(diverged.value)
    assert diverged.value.rows == [3, 0, 4]


def test_an_input_that_is_no_number_is_named_as_such() -> None:
    """In the step that it comes in, before it spoils a weight."""
    inputs, labels = separable(6)
    inputs[4, 0] = float("nan")
    model = nn.Sequential(linear())
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(inputs, labels, [[0, 1], [2, 3], [4, 5]])

    with pytest.raises(Diverged, match=r"epoch 0, step 2 is nan.*the layer '0' \(its inputs are none\)") as diverged:
        train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.0)), 0)

    assert diverged.value.rows == [4, 5]
    assert torch.equal(model[0].weight, before)


def test_gradients_that_are_no_numbers_end_the_step_before_it_is_taken() -> None:
    """The loss is a number, the square root of nothing has no slope."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(NUM_CLASSES, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs[:, :NUM_CLASSES] * self.scale.sqrt()

    inputs, labels = separable(6)
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(Diverged, match="the gradients of epoch 1, step 0 are no numbers, those of scale") as diverged:
        train_one_epoch(model, TensorLoader(inputs, labels, [range(6)]), optimizer, loop_of(Recorder()), 1)

    assert diverged.value.rows == [0, 1, 2, 3, 4, 5]
    assert bool(model.scale.isfinite().all())


def test_the_layer_is_looked_for_on_what_the_augmentation_made_of_the_batch() -> None:
    """The same changes are drawn again, not none and not others, of which the layer may make numbers."""

    class Root(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.sqrt()

    def negate_half(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (-inputs if float(torch.rand(())) < 0.5 else inputs), labels

    inputs, labels = separable(6)
    loader = TensorLoader(inputs.abs(), labels, [range(6)])
    said = []
    for seed in range(20):
        model = nn.Sequential(Root(), linear())
        optimizer, settings = torch.optim.SGD(model.parameters(), lr=0.0), StepSettings(augment=negate_half, seed=seed)
        try:
            train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.0), step=settings), 0)
        except Diverged as diverged:
            said.append(str(diverged))

    assert 0 < len(said) < 20
    assert all("comes from the layer '0' (its weights are numbers)" in one for one in said), said


def test_divergence_on_one_rank_ends_all() -> None:
    """A rank whose own images are fine raises too, instead of waiting for the other."""
    inputs, labels = separable(6)
    inputs[5] = float("nan")

    def rank_main(reducer: ThreadReducer) -> str:
        loader = TensorLoader(inputs, labels, [[reducer.rank * 5]], [2])
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pytest.raises(Diverged) as diverged:
            train_one_epoch(model, loader, optimizer, loop_of(Recorder(), reducer=reducer), 0)
        return f"{diverged.value} {diverged.value.rows}"

    (said,) = set(ThreadRanks(2).run(rank_main))
    assert "the training loss of epoch 0, step 0 is nan" in said
    assert said.endswith("[5]")  # the row of the rank that had it


def test_gradients_that_were_no_numbers_some_steps_ago_are_named_by_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is seen later; the images are still those of the step in which it came."""
    monkeypatch.setattr(non_finite, "should_check_finite", lambda step, num_steps, device: step == num_steps - 1)
    inputs, labels = separable(8)
    inputs[3, 0] = float("nan")
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = TensorLoader(inputs, labels, [[0, 1], [2, 3], [4, 5], [6, 7]])

    with pytest.raises(Diverged, match="of epoch 0, step 1 were no numbers, as seen after step 3") as diverged:
        train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 0)

    assert diverged.value.rows == [2, 3]


def test_validation_that_is_no_number_ends_the_training() -> None:
    """Whatever is watched: the steps may have seen numbers alone, and accuracy is one of any logits."""

    class Spoilt(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * (1.0 if self.training else float("nan"))

    inputs, labels = separable()
    loader = TensorLoader(inputs, labels, steps_of(len(labels), 10))
    with pytest.raises(Diverged, match=r"the loss on the split 'val' is nan after epoch 0: lower train.learning_rate"):
        fit_simply(Spoilt(4, NUM_CLASSES, dtype=torch.float64), loader, loader, new_progress())
