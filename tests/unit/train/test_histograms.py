"""Histograms of the outputs and gradient norms of layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tasks.train.histograms import MAX_VALUES, LayerHistograms
from tasks.train.loop import LoopSettings, train_one_epoch
from tasks.train.step import StepSettings
from tasks.train.step_callback import NullStepCallback
from tests.fakes.tiny_training import CPU, Recorder, TensorLoader, loop_of, separable, steps_of

NUM_EPOCHS, NUM_STEPS = 2, 3


class Counting(NullStepCallback):
    """Callback that counts its calls."""

    num_calls = 0

    def after_step(self) -> bool:
        """Count the call."""
        self.num_calls += 1
        return False


def network() -> nn.Sequential:
    """Return a network with a norm, a layer without parameters, dropout, and a frozen layer."""
    torch.manual_seed(4)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    layers[0].requires_grad_(False)
    return layers


def trained(model: nn.Module, loop: LoopSettings, histograms: LayerHistograms | None) -> dict[str, torch.Tensor]:
    """Return the state of a model after some epochs."""
    loader = TensorLoader(*separable(12), steps_of(12, 4))
    optimizer = torch.optim.Adam([own for own in model.parameters() if own.requires_grad])
    for epoch in range(NUM_EPOCHS):
        train_one_epoch(model, loader, optimizer, loop, epoch)
        if histograms is not None:
            histograms.end_epoch(epoch)
    return model.state_dict()


def test_training_is_the_same_and_each_epoch_has_its_histograms() -> None:
    """Weights and statistics are equal in every bit; a frozen layer has outputs and no gradients."""
    logged: list[dict[str, torch.Tensor]] = []
    counting, watched = Counting(), network()
    loop = loop_of(Recorder(0.01), step=StepSettings(seed=3))
    val = TensorLoader(*separable(9, seed=2), [[], *steps_of(9, 5)])  # Its first batch has no images on this rank.
    histograms = LayerHistograms(watched, val, CPU, lambda epoch, found: logged.insert(epoch, dict(found)))

    expected = trained(network(), loop, None)
    found = trained(watched, replace(loop, step_callback=counting, watchers=[histograms.after_step]), histograms)

    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert counting.num_calls == NUM_EPOCHS * NUM_STEPS
    assert len(logged) == NUM_EPOCHS
    layers = {"0": 8, "1": 8, "4": 3}
    for values in logged:
        assert {tag: len(each) for tag, each in values.items()} == {
            **{f"activations/{name}": 5 * width for name, width in layers.items()},
            **{f"gradient_norms/{name}": NUM_STEPS for name in ("1", "4")},
        }
    # The last epoch's are those of the model as it is now, without dropout.
    with torch.no_grad():
        outputs = watched.eval()(separable(9, seed=2)[0][:5])
    assert torch.allclose(logged[-1]["activations/4"].view(5, 3).double(), outputs, atol=1e-5)
    gradient = torch.cat([own.grad.flatten() for own in watched[4].parameters()])
    assert logged[-1]["gradient_norms/4"][-1] == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_large_outputs_are_sampled_and_what_is_not_finite_is_left_out() -> None:
    """A layer with an output of NaN has no histogram of it, and a large one at most MAX_VALUES values."""
    logged: dict[str, torch.Tensor] = {}
    layers = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1))
    nn.init.constant_(layers[1].weight, float("nan"))
    images = torch.ones((2, 1, 256, 256))
    loader = TensorLoader(images, torch.zeros(2, dtype=torch.int64), [[0, 1]])
    histograms = LayerHistograms(layers, loader, CPU, lambda _epoch, found: logged.update(found))

    histograms.end_epoch(0)

    assert logged.keys() == {"activations/0"}
    assert MAX_VALUES // 2 < len(logged["activations/0"]) <= MAX_VALUES


def test_head_alone_is_a_layer_and_a_server_that_is_away_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the epoch."""
    tags: list[str] = []

    def refuse(_epoch: int, found: object) -> None:
        tags.extend(found)
        raise ConnectionError("no answer")

    head, loader = nn.Linear(4, 3).double(), TensorLoader(*separable(6), [[0, 1]])
    histograms = LayerHistograms(head, loader, CPU, refuse)
    histograms.end_epoch(7)
    assert tags == ["activations/head"]
    assert caplog.messages == ["the histograms of epoch 7 were not logged: no answer"]
    assert not head._forward_hooks
