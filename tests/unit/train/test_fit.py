"""Training of a phase: early stopping, best weights, and ranks as threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tasks.cache.loader import Batch
from tasks.model.training_network import build_classifier
from tasks.train.buffers import average_buffers
from tasks.train.progress import Progress
from tests.builders.small_network import SMALL
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import (
    NUM_CLASSES,
    TensorLoader,
    fit_simply,
    linear,
    new_progress,
    separable,
    steps_of,
)


@pytest.mark.parametrize("monitor", ["val_accuracy", "val_macro_f1", "val_top5_accuracy"])
def test_early_stopping_uses_the_monitored_metric(monitor: str) -> None:
    """The best value is the maximum of the monitored metric in the history."""
    inputs, labels = separable(12)
    loader, progress = TensorLoader(inputs, labels, steps_of(12, 4)), new_progress(patience=20)

    fit_simply(linear(), loader, loader, progress, max_epochs=6, monitor=monitor, rate=0.02)

    values = [getattr(metrics, monitor) for metrics in progress.history]
    assert progress.stopping.best == max(values) == values[progress.stopping.best_epoch]


def test_two_ranks_train_like_one_process() -> None:
    """With unequal and empty shares of a step, two ranks get the weights and metrics of one process."""
    inputs, labels = separable(20)
    shares = [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        [[10, 11, 12, 13], [14], []],
    ]
    combined = [first + second for first, second in zip(*shares, strict=True)]
    global_rows = [len(rows) for rows in combined]
    # Created here: ranks are threads, and would draw concurrently from the generator of the process.
    models = [linear(), linear()]

    def rank_main(reducer: ThreadReducer) -> tuple[nn.Linear, Progress]:
        model, progress = models[reducer.rank], new_progress(9)
        share = TensorLoader(inputs, labels, shares[reducer.rank], global_rows)
        fit_simply(model, share, share, progress, max_epochs=4, reducer=reducer)
        return model, progress

    single, expected = linear(), new_progress(9)
    loader = TensorLoader(inputs, labels, combined)
    fit_simply(single, loader, loader, expected, max_epochs=4)

    for model, progress in ThreadRanks(2).run(rank_main):
        assert torch.allclose(model.weight, single.weight, rtol=1e-10)
        for metrics, reference in zip(progress.history, expected.history, strict=True):
            assert metrics.train_loss == pytest.approx(reference.train_loss, rel=1e-10)
            assert metrics.val_loss == pytest.approx(reference.val_loss, rel=1e-10)
            assert metrics.val_accuracy == reference.val_accuracy
    assert not torch.equal(single.weight, linear().weight)


def test_batch_norm_statistics_are_averaged_over_ranks() -> None:
    """Running means of 1 and 3 become 2 on both ranks, and the integer count of batches is unchanged."""

    def rank_main(reducer: ThreadReducer) -> nn.BatchNorm1d:
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(1.0 + 2.0 * reducer.rank)
        norm.num_batches_tracked.fill_(5)
        average_buffers(norm, reducer)
        return norm

    for norm in ThreadRanks(2).run(rank_main):
        assert norm.running_mean.tolist() == [2.0, 2.0]
        assert norm.running_var.tolist() == [1.0, 1.0]
        assert norm.num_batches_tracked.item() == 5


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_statistics_that_are_equal_on_all_ranks_keep_every_bit(num_ranks: int) -> None:
    """Statistics of frozen layers stay as they are, although a sum over three ranks divided by 3 may be rounded."""
    frozen = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(torch.stack([frozen] * 3).sum(dim=0) / 3, frozen)

    def rank_main(reducer: ThreadReducer) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(10_000), nn.BatchNorm1d(1))
        model[0].running_mean.copy_(frozen)
        model[1].running_mean.fill_(float(reducer.rank))
        average_buffers(model, reducer)
        return model[0].running_mean, model[1].running_mean

    for kept, averaged in ThreadRanks(num_ranks).run(rank_main):
        assert torch.equal(kept, frozen)
        assert averaged.tolist() == pytest.approx([(num_ranks - 1) / 2])


def test_frozen_layers_are_unchanged_by_epochs_on_three_ranks() -> None:
    """A frozen backbone has the same statistics in every bit after training on ranks, and the trained ones move."""
    labels = torch.arange(12) % NUM_CLASSES
    networks = [build_classifier(SMALL, "none", NUM_CLASSES, freeze_backbone=True) for _rank in range(3)]
    for network in networks:
        network.load_state_dict(networks[0].state_dict())
        network.unfreeze_from("conv5")
    images = torch.randint(0, 256, (12, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in networks[0].named_buffers()}

    def rank_main(reducer: ThreadReducer) -> dict[str, torch.Tensor]:
        network = networks[reducer.rank]
        share = TensorLoader(images, labels, [list(range(reducer.rank * 4, reducer.rank * 4 + 4))], [12])
        fit_simply(network, share, share, new_progress(), max_epochs=2, reducer=reducer)
        return dict(network.named_buffers())

    for buffers in ThreadRanks(3).run(rank_main):
        changed = {name for name, value in buffers.items() if not torch.equal(value, before[name])}
        assert changed
        assert all(name.startswith("network.conv5.") for name in changed)


def test_ranks_validate_with_the_same_batch_norm_statistics() -> None:
    """After each epoch all ranks have the mean of the statistics of their own images."""
    inputs, labels = separable(12)
    inputs[6:] += 100.0

    def rank_main(reducer: ThreadReducer) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES)).double()
        model[1].load_state_dict(linear().state_dict())
        share = TensorLoader(inputs, labels, [list(range(reducer.rank * 6, reducer.rank * 6 + 6))], [12])
        fit_simply(model, share, share, new_progress(), max_epochs=1, rate=0.0, reducer=reducer)
        return model.state_dict()

    first, second = ThreadRanks(2).run(rank_main)

    assert torch.equal(first["0.running_mean"], second["0.running_mean"])
    assert torch.allclose(first["0.running_mean"], 0.1 * inputs.mean(dim=0))


class DegradingLoader(TensorLoader):
    """Validation split with wrong labels after some evaluations, so that the loss rises."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, num_correct: int) -> None:
        super().__init__(inputs, labels, [list(range(len(labels)))])
        self._num_correct = num_correct
        self._num_evaluations = 0

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches."""
        for batch in super().epoch(number, start):
            wrong = (batch.labels_B + 1) % NUM_CLASSES
            yield batch if self._num_evaluations < self._num_correct else batch._replace(labels_B=wrong)
        self._num_evaluations += 1


def test_training_stops_early_and_restores_the_best_weights() -> None:
    """The loss rises after epoch 2: training stops after two epochs of patience, with the weights of epoch 2."""
    inputs, labels = separable()
    model, progress = linear(), new_progress(patience=2, higher_is_better=False)
    weights: list[torch.Tensor] = []

    fit_simply(
        model,
        TensorLoader(inputs, labels, steps_of(30, 8)),
        DegradingLoader(inputs, labels, num_correct=3),
        progress,
        max_epochs=50,
        monitor="val_loss",
        on_epoch=lambda metrics, now: weights.append(model.weight.detach().clone()),
    )

    assert progress.stopping.best_epoch == 2
    assert [metrics.epoch for metrics in progress.history] == [0, 1, 2, 3, 4]
    assert torch.equal(model.weight, weights[2])
    assert not torch.equal(model.weight, weights[4])


def test_patience_does_not_count_during_the_warmup() -> None:
    """The loss rises from the start: with 2.5 epochs of warm-up, the two epochs of patience begin after epoch 2."""
    inputs, labels = separable()
    progress = new_progress(patience=2, higher_is_better=False)

    fit_simply(
        linear(),
        TensorLoader(inputs, labels, steps_of(30, 8)),
        DegradingLoader(inputs, labels, num_correct=1),
        progress,
        max_epochs=50,
        monitor="val_loss",
        patient_from=2.5,
    )

    assert progress.stopping.best_epoch == 0
    assert [metrics.epoch for metrics in progress.history] == [0, 1, 2, 3, 4]


def test_training_ends_at_max_epochs() -> None:
    """While the loss falls, training ends after max_epochs, and each epoch is reported."""
    inputs, labels = separable()
    loader = TensorLoader(inputs, labels, steps_of(30, 8))
    progress, reported = new_progress(higher_is_better=False), []

    fit_simply(
        linear(), loader, loader, progress, max_epochs=4, monitor="val_loss",
        on_epoch=lambda metrics, now: reported.append((metrics.epoch, now.next_epoch, len(now.history))),
    )  # fmt: skip

    assert reported == [(0, 1, 1), (1, 2, 2), (2, 3, 3), (3, 4, 4)]
    losses = [metrics.val_loss for metrics in progress.history]
    assert losses == sorted(losses, reverse=True)
    assert progress.stopping.best_epoch == 3


def test_loop_learns_separable_classes() -> None:
    """A linear model classifies linearly separable classes after a few epochs."""
    inputs, labels = separable(90)
    loader = TensorLoader(inputs, labels, steps_of(90, 8))
    progress = new_progress(patience=30)

    fit_simply(linear(), loader, loader, progress, max_epochs=20)

    assert progress.history[-1].val_accuracy > 0.95
    assert progress.history[-1].train_loss < progress.history[0].train_loss / 2


def test_finished_run_only_restores_the_best_weights() -> None:
    """A run that was killed after its last epoch and is resumed trains no further epoch."""
    inputs, labels = separable()
    loader = TensorLoader(inputs, labels, steps_of(30, 8))
    progress = new_progress()
    fit_simply(linear(), loader, loader, progress, max_epochs=3)
    model, before = linear(seed=5), len(progress.history)

    fit_simply(model, loader, loader, progress, max_epochs=3)

    assert len(progress.history) == before
    assert torch.equal(model.weight, progress.best_state["weight"])
