"""Epochs of the training loop with tiny networks, tensor loaders, and ranks as threads."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.collectives.reducer import Reducer
from tasks.metrics.evaluate import evaluate
from tasks.train.loop import accumulate_gradients, train_one_epoch
from tasks.train.step import StepSettings
from tasks.train.step_callback import NullStepCallback
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import (
    CPU,
    NUM_CLASSES,
    Recorder,
    TensorLoader,
    linear,
    loop_of,
    separable,
    steps_of,
)


def test_learning_rate_is_set_per_step_counted_over_all_epochs() -> None:
    """With 3 steps per epoch, epoch 2 starts at step 6, and the optimizer gets the rate of each step."""
    inputs, labels = separable(9)
    model, recorder = linear(), Recorder(rate=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)

    loader = TensorLoader(inputs, labels, steps_of(9, 3))
    train_one_epoch(model, loader, optimizer, loop_of(recorder), 2)

    assert recorder.steps == [6, 7, 8]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_training_metrics_are_means_over_images() -> None:
    """Batches count by their number of images, so that the loss is the mean over the split."""
    inputs, labels = separable(10)
    model = linear()
    loader = TensorLoader(inputs, labels, [[0, 1, 2, 3, 4, 5, 6, 7], [8], [9]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    trained = train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.0)), 0)

    logits = model(inputs).detach()
    assert trained.train_loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-9)
    assert trained.train_accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert 0.0 <= trained.data_wait_share <= 1.0


def test_watchers_see_each_step_until_the_callback_ends_the_epoch() -> None:
    """Each is called before the callback, also after the last step."""
    called: list[str] = []

    class Deciding(NullStepCallback):
        def after_step(self) -> bool:
            called.append("callback")
            return len(called) == 6

    model, loader = linear(), TensorLoader(*separable(12), steps_of(12, 3))
    watchers = [lambda: called.append("first"), lambda: called.append("second")]
    loop = replace(loop_of(Recorder(0.1)), watchers=watchers, step_callback=Deciding())
    train_one_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), loop, 0)
    assert called == ["first", "second", "callback"] * 2


def test_gradients_above_the_maximum_norm_are_clipped() -> None:
    """Clipping keeps the direction of the gradients, and the reported norm is that before clipping."""
    inputs, labels = separable(6)
    updates = []
    for max_norm in (None, 1e-3, 1e3):
        model = linear()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trained = train_one_epoch(
            model,
            TensorLoader(inputs, labels, [range(6)]),
            optimizer,
            loop_of(Recorder(1.0), step=StepSettings(max_gradient_norm=max_norm)),
            0,
        )
        updates.append(before - nn.utils.parameters_to_vector(model.parameters()).detach())
        assert trained.gradient_norm == pytest.approx(float(updates[0].norm()))

    assert float(updates[1].norm()) == pytest.approx(1e-3, rel=1e-3)
    assert torch.allclose(updates[1] / updates[1].norm(), updates[0] / updates[0].norm())
    assert torch.equal(updates[2], updates[0])


def test_ranks_clip_their_averaged_gradients() -> None:
    """Ranks take the same step as one process on all images, with the same gradient norm."""
    inputs, labels = separable(8)
    settings = StepSettings(label_smoothing=0.1, max_gradient_norm=1e-3)

    # Created here: ranks are threads, and would draw concurrently from the generator of the process.
    models = [linear(), linear(), linear()]

    def train(loader: TensorLoader, reducer: Reducer) -> tuple[torch.Tensor, float]:
        model = models.pop()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trained = train_one_epoch(model, loader, optimizer, loop_of(Recorder(1.0), reducer=reducer, step=settings), 0)
        return nn.utils.parameters_to_vector(model.parameters()).detach(), trained.gradient_norm

    def rank_main(reducer: ThreadReducer) -> tuple[torch.Tensor, float]:
        rows = range(5) if reducer.rank == 0 else range(5, 8)
        return train(TensorLoader(inputs, labels, [rows], [8]), reducer)

    weights, norm = train(TensorLoader(inputs, labels, [range(8)]), Reducer())
    for found, its_norm in ThreadRanks(2).run(rank_main):
        assert torch.allclose(found, weights)
        assert its_norm == pytest.approx(norm)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_accumulated_batches_train_like_one_large_batch(num_parts: int, max_norm: float | None) -> None:
    """SGD with momentum gets the weights, metrics and rates of batches that are as large as a step, the last too."""
    inputs, labels = separable(30)
    whole, recorder = linear(), Recorder()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.0, momentum=0.9)
    loader = TensorLoader(inputs, labels, steps_of(30, 4 * num_parts))
    settings = StepSettings(max_gradient_norm=max_norm)
    expected = [train_one_epoch(whole, loader, optimizer, loop_of(recorder, step=settings), epoch) for epoch in (0, 1)]

    parts, recorder_of_parts = linear(), Recorder()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.0, momentum=0.9)
    loader = TensorLoader(inputs, labels, steps_of(30, 4))
    loop = loop_of(recorder_of_parts, step=replace(settings, accumulate_steps=num_parts))
    trained = [train_one_epoch(parts, loader, optimizer, loop, epoch) for epoch in (0, 1)]

    assert torch.allclose(parts.weight, whole.weight, rtol=1e-12)
    assert recorder_of_parts.steps == recorder.steps
    for one, other in zip(trained, expected, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-12)
        assert one.train_accuracy == other.train_accuracy
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-12)
    assert not torch.equal(parts.weight, linear().weight)


def test_ranks_accumulate_unequal_and_empty_batches_like_one_process() -> None:
    """Every image of a step has the same weight, on whatever rank and in whatever batch it is."""
    inputs, labels = separable(20)
    shares = [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []],
        [[10, 11, 12, 13], [14], [], [15]],
    ]
    combined = [shares[0][0] + shares[1][0] + shares[0][1] + shares[1][1], [8, 9, 15]]
    single = linear()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.0)
    train_one_epoch(single, TensorLoader(inputs, labels, combined), optimizer, loop_of(Recorder()), 0)
    models = [linear(), linear()]

    def rank_main(reducer: ThreadReducer) -> nn.Linear:
        model = models[reducer.rank]
        loader = TensorLoader(inputs, labels, shares[reducer.rank], [8, 5, 2, 1])
        loop = loop_of(Recorder(), reducer, StepSettings(accumulate_steps=2))
        train_one_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.0), loop, 0)
        return model

    for model in ThreadRanks(2).run(rank_main):
        assert torch.allclose(model.weight, single.weight, rtol=1e-12)


def test_accumulated_gradients_have_the_memory_format_of_their_parameters() -> None:
    """A convolution of channels-last images returns gradients in another one than that of its contiguous weights."""
    convolution = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    accumulate_gradients(list(convolution.parameters()), convolution(images).square().sum())

    assert convolution.weight.grad is not None
    assert convolution.weight.grad.is_contiguous()
    whole = convolution.weight.grad.clone()
    accumulate_gradients(list(convolution.parameters()), convolution(images).square().sum())
    assert torch.allclose(convolution.weight.grad, 2 * whole)


def test_label_smoothing_applies_to_training_and_not_to_evaluation() -> None:
    """Evaluation reports the plain cross-entropy, which is comparable between training runs."""
    inputs, labels = separable(6)
    model, loader = linear(), TensorLoader(inputs, labels, [range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    trained = train_one_epoch(
        model, loader, optimizer, loop_of(Recorder(0.0), step=StepSettings(label_smoothing=0.2)), 0
    )

    logits = model(inputs).detach()
    plain, uniform = functional.cross_entropy(logits, labels), -functional.log_softmax(logits, dim=1).mean()
    assert trained.train_loss == pytest.approx(float(0.8 * plain + 0.2 * uniform))
    assert evaluate(model, loader, NUM_CLASSES, CPU, Reducer()).loss == pytest.approx(float(plain))


def test_step_follows_the_gradient_of_the_mean_loss() -> None:
    """One step equals plain gradient descent on the mean loss."""
    inputs, labels = separable(6)
    model, reference = linear(), linear()
    loader = TensorLoader(inputs, labels, [list(range(6))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.5)), 0)

    functional.cross_entropy(reference(inputs), labels).backward()
    assert reference.weight.grad is not None
    assert torch.allclose(model.weight, reference.weight - 0.5 * reference.weight.grad, rtol=1e-12)


def test_empty_batches_change_nothing() -> None:
    """A step without images changes neither weights nor metrics."""
    inputs, labels = separable(6)
    with_empty, without = linear(), linear()
    results = []
    for model, steps in ((with_empty, [[0, 1, 2], [], [3, 4, 5], []]), (without, [[0, 1, 2], [3, 4, 5]])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = TensorLoader(inputs, labels, steps)
        trained = train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 0)
        results.append((trained.train_loss, trained.train_accuracy))

    assert torch.equal(with_empty.weight, without.weight)
    assert results[0] == results[1]


def test_batch_of_one_image_trains_with_batch_norm() -> None:
    """A last batch of one image, which has no variance for batch norm, is trained on with a finite loss."""
    inputs, labels = separable(5)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)).double()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    loader = TensorLoader(inputs, labels, [[0, 1, 2, 3], [4]])
    loss = train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 0).train_loss

    assert math.isfinite(loss)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert not torch.equal(model[0].weight, before)


def test_largest_seed_can_be_trained_with() -> None:
    """The seeds of the steps, derived from the largest setting, are in torch's range."""
    inputs, labels = separable(6)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = StepSettings(seed=2**32 - 1)

    loss = train_one_epoch(
        model, TensorLoader(inputs, labels, [range(6)]), optimizer, loop_of(Recorder(), step=settings), 9999
    ).train_loss

    assert math.isfinite(loss)
