"""Non-finite losses, inputs and gradients, which end training with their step and layer."""

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
def test_non_finite_loss_is_raised_with_its_layer_and_rows(weight: float, bias: float, loss: str) -> None:
    """A NaN or infinite loss raises an error with step, layer and rows of the batch."""
    inputs, labels = separable(6)
    model = nn.Sequential(nn.ReLU(), linear())
    with torch.no_grad():
        model[1].weight[0] = weight
        model[1].bias[0] = bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(inputs, labels, [[3, 0, 4], [1, 2, 5]])
    parameter = "weight" if math.isnan(weight) else "bias"

    with pytest.raises(Diverged) as diverged:
        train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 3)

    assert f"the training loss of epoch 3, step 0 is {loss}" in str(diverged.value)
    assert f"the layer '1' (non-finite {parameter})" in str(diverged.value)
    assert diverged.value.rows == [3, 0, 4]


def test_non_finite_loss_of_an_accumulated_step_has_the_rows_of_the_step() -> None:
    """The error is raised with the step, after its last batch, and before any weight changes."""
    inputs, labels = separable(8)
    inputs[5, 0] = float("nan")
    model = nn.Sequential(linear())
    before = model[0].weight.detach().clone()
    loader = TensorLoader(inputs, labels, [[0, 1], [2, 3], [4, 5], [6, 7]])
    loop = loop_of(Recorder(0.0), step=StepSettings(accumulate_steps=2))

    with pytest.raises(Diverged, match=r"epoch 0, step 1 is nan.*\(non-finite inputs\)") as diverged:
        train_one_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.0), loop, 0)

    assert diverged.value.rows == [4, 5, 6, 7]
    assert torch.equal(model[0].weight, before)


def test_non_finite_input_is_named() -> None:
    """The error is raised in the step of the input, before any weight changes."""
    inputs, labels = separable(6)
    inputs[4, 0] = float("nan")
    model = nn.Sequential(linear())
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(inputs, labels, [[0, 1], [2, 3], [4, 5]])

    with pytest.raises(Diverged, match=r"step 2 is nan.*layer '0' \(non-finite inputs\)") as diverged:
        train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.0)), 0)

    assert diverged.value.rows == [4, 5]
    assert torch.equal(model[0].weight, before)


def test_non_finite_gradients_are_raised_before_the_step() -> None:
    """The loss is finite, but the derivative of the square root at 0 is not."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(NUM_CLASSES, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs[:, :NUM_CLASSES] * self.scale.sqrt()

    inputs, labels = separable(6)
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(Diverged, match="epoch 1, step 0 are non-finite, those of scale") as diverged:
        train_one_epoch(model, TensorLoader(inputs, labels, [range(6)]), optimizer, loop_of(Recorder()), 1)

    assert diverged.value.rows == [0, 1, 2, 3, 4, 5]
    assert bool(model.scale.isfinite().all())


def test_layer_is_searched_with_the_augmented_batch() -> None:
    """The search repeats the random augmentation of the step, without which the layer's output may be finite."""

    class Root(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.sqrt()

    def negate_half(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (-inputs if float(torch.rand(())) < 0.5 else inputs), labels

    inputs, labels = separable(6)
    loader = TensorLoader(inputs.abs(), labels, [range(6)])
    messages = []
    for seed in range(20):
        model = nn.Sequential(Root(), linear())
        optimizer, settings = torch.optim.SGD(model.parameters(), lr=0.0), StepSettings(augment=negate_half, seed=seed)
        try:
            train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.0), step=settings), 0)
        except Diverged as diverged:
            messages.append(str(diverged))

    assert 0 < len(messages) < 20
    assert all("comes from the layer '0' (finite weights)" in message for message in messages), messages


def test_divergence_on_one_rank_is_raised_on_all() -> None:
    """A rank with a finite loss raises the same error, instead of waiting for the other rank."""
    inputs, labels = separable(6)
    inputs[5] = float("nan")

    def rank_main(reducer: ThreadReducer) -> str:
        loader = TensorLoader(inputs, labels, [[reducer.rank * 5]], [2])
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pytest.raises(Diverged) as diverged:
            train_one_epoch(model, loader, optimizer, loop_of(Recorder(), reducer=reducer), 0)
        return f"{diverged.value} {diverged.value.rows}"

    (message,) = set(ThreadRanks(2).run(rank_main))
    assert "the training loss of epoch 0, step 0 is nan" in message
    assert message.endswith("[5]")  # the row of the rank with the non-finite loss


def test_non_finite_gradients_of_an_earlier_step_are_named_by_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later check, as on a GPU, reports step and rows of the first non-finite gradients."""
    monkeypatch.setattr(non_finite, "should_check_finite", lambda step, num_steps, device: step == num_steps - 1)
    inputs, labels = separable(8)
    inputs[3, 0] = float("nan")
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = TensorLoader(inputs, labels, [[0, 1], [2, 3], [4, 5], [6, 7]])

    with pytest.raises(Diverged, match="epoch 0, step 1 were .* detected after step 3") as diverged:
        train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 0)

    assert diverged.value.rows == [2, 3]


def test_non_finite_validation_loss_is_raised() -> None:
    """The error is raised for any monitored metric, although all losses in training were finite."""

    class NanInEvaluation(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * (1.0 if self.training else float("nan"))

    inputs, labels = separable()
    loader = TensorLoader(inputs, labels, steps_of(len(labels), 10))
    with pytest.raises(Diverged, match=r"'val' is nan after epoch 0: lower"):
        fit_simply(NanInEvaluation(4, NUM_CLASSES, dtype=torch.float64), loader, loader, new_progress())
