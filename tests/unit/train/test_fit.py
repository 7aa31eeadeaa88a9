"""A phase of training: early stopping, the best weights, and ranks that are threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tasks.cache.loader import Batch
from tasks.train.loop import average_buffers
from tasks.train.progress import Progress
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
def test_early_stopping_watches_the_metric_it_is_told(monitor: str) -> None:
    """Its best value is that of the history's best epoch."""
    inputs, labels = separable(12)
    loader, progress = TensorLoader(inputs, labels, steps_of(12, 4)), new_progress(patience=20)

    fit_simply(linear(), loader, loader, progress, max_epochs=6, monitor=monitor, rate=0.02)

    values = [getattr(metrics, monitor) for metrics in progress.history]
    assert progress.stopping.best == max(values) == values[progress.stopping.best_epoch]


def test_two_ranks_train_as_one_process() -> None:
    """Steps with unequal shares, and one that a rank has nothing in, give the weights of one process with it all."""
    inputs, labels = separable(20)
    shares = [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        [[10, 11, 12, 13], [14], []],
    ]
    whole = [first + second for first, second in zip(*shares, strict=True)]
    global_rows = [len(rows) for rows in whole]
    # Made here: torch's generator is the process's, and ranks that are threads would draw from it in turns.
    models = [linear(), linear()]

    def rank_main(reducer: ThreadReducer) -> tuple[nn.Linear, Progress]:
        model, progress = models[reducer.rank], new_progress(9)
        mine = TensorLoader(inputs, labels, shares[reducer.rank], global_rows)
        fit_simply(model, mine, mine, progress, max_epochs=4, reducer=reducer)
        return model, progress

    single, alone = linear(), new_progress(9)
    together = TensorLoader(inputs, labels, whole)
    fit_simply(single, together, together, alone, max_epochs=4)

    for model, progress in ThreadRanks(2).run(rank_main):
        assert torch.allclose(model.weight, single.weight, rtol=1e-10)
        for mine, theirs in zip(progress.history, alone.history, strict=True):
            assert mine.train_loss == pytest.approx(theirs.train_loss, rel=1e-10)
            assert mine.val_loss == pytest.approx(theirs.val_loss, rel=1e-10)
            assert mine.val_accuracy == theirs.val_accuracy
    assert not torch.equal(single.weight, linear().weight)


def test_batch_norm_statistics_are_averaged_over_ranks() -> None:
    """Running means of 1 and 3 become 2 on both ranks; the count of batches, an integer, is left alone."""

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


def test_ranks_validate_with_the_same_batch_norm_statistics() -> None:
    """Each rank saw its own images; after every epoch all have the mean of what they saw."""
    inputs, labels = separable(12)
    inputs[6:] += 100.0

    def rank_main(reducer: ThreadReducer) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES)).double()
        model[1].load_state_dict(linear().state_dict())
        mine = TensorLoader(inputs, labels, [list(range(reducer.rank * 6, reducer.rank * 6 + 6))], [12])
        fit_simply(model, mine, mine, new_progress(), max_epochs=1, rate=0.0, reducer=reducer)
        return model.state_dict()

    first, second = ThreadRanks(2).run(rank_main)

    assert torch.equal(first["0.running_mean"], second["0.running_mean"])
    assert torch.allclose(first["0.running_mean"], 0.1 * inputs.mean(dim=0))


class TurningLoader(TensorLoader):
    """A validation split whose labels turn wrong after some evaluations, so that the loss rises."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, right_for: int) -> None:
        super().__init__(inputs, labels, [list(range(len(labels)))])
        self._right_for = right_for
        self._asked = 0

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches."""
        for batch in super().epoch(number, start):
            wrong = (batch.labels_B + 1) % NUM_CLASSES
            yield batch if self._asked < self._right_for else batch._replace(labels_B=wrong)
        self._asked += 1


def test_training_stops_early_and_the_best_weights_come_back() -> None:
    """The loss rises after epoch 2: two epochs of patience later training stops, with the weights of epoch 2."""
    inputs, labels = separable()
    model, progress = linear(), new_progress(patience=2, higher_is_better=False)
    weights: list[torch.Tensor] = []

    fit_simply(
        model,
        TensorLoader(inputs, labels, steps_of(30, 8)),
        TurningLoader(inputs, labels, right_for=3),
        progress,
        max_epochs=50,
        monitor="val_loss",
        on_epoch=lambda metrics, now: weights.append(model.weight.detach().clone()),
    )

    assert progress.stopping.best_epoch == 2
    assert [metrics.epoch for metrics in progress.history] == [0, 1, 2, 3, 4]
    assert torch.equal(model.weight, weights[2])
    assert not torch.equal(model.weight, weights[4])


def test_training_ends_at_max_epochs() -> None:
    """While the loss still falls, max_epochs is the bound, and every epoch is reported as it ends."""
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


def test_loop_learns_what_can_be_learned() -> None:
    """Classes that a line separates are told apart after a few epochs."""
    inputs, labels = separable(90)
    loader = TensorLoader(inputs, labels, steps_of(90, 8))
    progress = new_progress(patience=30)

    fit_simply(linear(), loader, loader, progress, max_epochs=20)

    assert progress.history[-1].val_accuracy > 0.95
    assert progress.history[-1].train_loss < progress.history[0].train_loss / 2


def test_finished_training_only_restores_the_best_weights() -> None:
    """Killed after its last epoch, a training that is started again trains no further epoch."""
    inputs, labels = separable()
    loader = TensorLoader(inputs, labels, steps_of(30, 8))
    progress = new_progress()
    fit_simply(linear(), loader, loader, progress, max_epochs=3)
    model, before = linear(seed=5), len(progress.history)

    fit_simply(model, loader, loader, progress, max_epochs=3)

    assert len(progress.history) == before
    assert torch.equal(model.weight, progress.best_state["weight"])
