"""An epoch of the training loop with tiny networks, loaders of tensors and ranks that are threads."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.collectives import Reducer, SingleProcess
from tasks.metrics.evaluate import evaluate
from tasks.train.loop import train_one_epoch
from tasks.train.step import StepSettings
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


def test_learning_rate_is_asked_for_each_step_over_all_epochs() -> None:
    """Epoch 2 of 3 steps begins at step 6, and the optimizer gets what is answered."""
    inputs, labels = separable(9)
    model, recorder = linear(), Recorder(rate=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)

    loader = TensorLoader(inputs, labels, steps_of(9, 3))
    train_one_epoch(model, loader, optimizer, loop_of(recorder), 2)

    assert recorder.steps == [6, 7, 8]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_training_metrics_are_means_over_images() -> None:
    """Batches of different size weigh by their images: the loss is that of the whole split."""
    inputs, labels = separable(10)
    model = linear()
    loader = TensorLoader(inputs, labels, [[0, 1, 2, 3, 4, 5, 6, 7], [8], [9]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    trained = train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.0)), 0)

    logits = model(inputs).detach()
    assert trained.loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-9)
    assert trained.accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert 0.0 <= trained.data_wait_share <= 1.0


def test_gradients_above_the_bound_are_scaled_down_to_it() -> None:
    """All together, so that their direction stays; what is reported is the norm before."""
    inputs, labels = separable(6)
    moves = []
    for bound in (None, 1e-3, 1e3):
        model = linear()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trained = train_one_epoch(
            model,
            TensorLoader(inputs, labels, [range(6)]),
            optimizer,
            loop_of(Recorder(1.0), step=StepSettings(max_gradient_norm=bound)),
            0,
        )
        moves.append(before - nn.utils.parameters_to_vector(model.parameters()).detach())
        assert trained.gradient_norm == pytest.approx(float(moves[0].norm()))

    assert float(moves[1].norm()) == pytest.approx(1e-3, rel=1e-3)
    assert torch.allclose(moves[1] / moves[1].norm(), moves[0] / moves[0].norm())
    assert torch.equal(moves[2], moves[0])


def test_ranks_bound_the_average_of_their_gradients() -> None:
    """Not each its own: they take the step of one process on all images."""
    inputs, labels = separable(8)
    settings = StepSettings(label_smoothing=0.1, max_gradient_norm=1e-3)

    # Made here: torch's generator is the process's, and ranks that are threads would draw from it in turns.
    models = [linear(), linear(), linear()]

    def train(loader: TensorLoader, reducer: Reducer) -> tuple[torch.Tensor, float]:
        model = models.pop()
        optimizer = reducer.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        trained = train_one_epoch(model, loader, optimizer, loop_of(Recorder(1.0), reducer=reducer, step=settings), 0)
        return nn.utils.parameters_to_vector(model.parameters()).detach(), trained.gradient_norm

    def rank_main(reducer: ThreadReducer) -> tuple[torch.Tensor, float]:
        rows = range(5) if reducer.rank == 0 else range(5, 8)
        return train(TensorLoader(inputs, labels, [rows], [8]), reducer)

    weights, norm = train(TensorLoader(inputs, labels, [range(8)]), SingleProcess())
    for found, its_norm in ThreadRanks(2).run(rank_main):
        assert torch.allclose(found, weights)
        assert its_norm == pytest.approx(norm)


def test_label_smoothing_is_in_the_loss_that_is_trained_and_not_in_the_evaluation() -> None:
    """What is compared between trainings is the plain cross-entropy."""
    inputs, labels = separable(6)
    model, loader = linear(), TensorLoader(inputs, labels, [range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    trained = train_one_epoch(
        model, loader, optimizer, loop_of(Recorder(0.0), step=StepSettings(label_smoothing=0.2)), 0
    )

    logits = model(inputs).detach()
    plain, uniform = functional.cross_entropy(logits, labels), -functional.log_softmax(logits, dim=1).mean()
    assert trained.loss == pytest.approx(float(0.8 * plain + 0.2 * uniform))
    assert evaluate(model, loader, NUM_CLASSES, CPU, SingleProcess()).loss == pytest.approx(float(plain))


def test_a_step_is_the_gradient_of_the_mean_loss() -> None:
    """One step of plain gradient descent is the textbook's."""
    inputs, labels = separable(6)
    model, textbook = linear(), linear()
    loader = TensorLoader(inputs, labels, [list(range(6))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    train_one_epoch(model, loader, optimizer, loop_of(Recorder(0.5)), 0)

    functional.cross_entropy(textbook(inputs), labels).backward()
    assert textbook.weight.grad is not None
    assert torch.allclose(model.weight, textbook.weight - 0.5 * textbook.weight.grad, rtol=1e-12)


def test_empty_batches_change_nothing() -> None:
    """A step without images leaves weights and metrics as they are."""
    inputs, labels = separable(6)
    with_empty, without = linear(), linear()
    results = []
    for model, steps in ((with_empty, [[0, 1, 2], [], [3, 4, 5], []]), (without, [[0, 1, 2], [3, 4, 5]])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = TensorLoader(inputs, labels, steps)
        trained = train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 0)
        results.append((trained.loss, trained.accuracy))

    assert torch.equal(with_empty.weight, without.weight)
    assert results[0] == results[1]


def test_lone_image_trains_with_batch_norm() -> None:
    """A last batch of one image, of which batch norm can take no variance, trains all the same and counts once."""
    inputs, labels = separable(5)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)).double()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    loader = TensorLoader(inputs, labels, [[0, 1, 2, 3], [4]])
    loss = train_one_epoch(model, loader, optimizer, loop_of(Recorder()), 0).loss

    assert math.isfinite(loss)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert not torch.equal(model[0].weight, before)


def test_any_seed_of_the_form_can_be_trained_with() -> None:
    """Every step draws from a seed of its own, made of this one."""
    inputs, labels = separable(6)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = StepSettings(seed=2**32 - 1)

    loss = train_one_epoch(
        model, TensorLoader(inputs, labels, [range(6)]), optimizer, loop_of(Recorder(), step=settings), 9999
    ).loss

    assert math.isfinite(loss)
