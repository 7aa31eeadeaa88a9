"""The training loop with tiny networks, loaders of tensors and ranks that are threads."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import Batch
from tasks.train.early_stopping import EarlyStopping
from tasks.train.loop import (
    Diverged,
    EpochMetrics,
    Evaluation,
    Progress,
    average_buffers,
    evaluate,
    fit,
    train_one_epoch,
)
from tasks.train.reduce import Reducer, SingleProcess

CPU = torch.device("cpu")
NUM_CLASSES = 3


class TensorLoader:
    """Batches given as lists of row numbers of two tensors, the same in every epoch."""

    def __init__(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        steps: Sequence[Sequence[int]],
        global_rows: Sequence[int] | None = None,
    ) -> None:
        self._inputs = inputs
        self._labels = labels
        self._steps = steps
        self._global_rows = global_rows or [len(rows) for rows in steps]

    @property
    def num_steps(self) -> int:
        """Return how many batches an epoch has."""
        return len(self._steps)

    def num_global_rows(self, step: int) -> int:
        """Return how many pictures all ranks have in the step."""
        return self._global_rows[step]

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches."""
        for rows in self._steps:
            chosen = torch.tensor(list(rows), dtype=torch.int64)
            yield Batch(self._inputs[chosen], self._labels[chosen], np.array(rows, dtype=np.int64))


class ThreadRanks:
    """What ranks have in common: a board each writes its value on, and a barrier."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.board: list[Any] = [None] * num_ranks

    def run(self, rank_main: Callable[["ThreadReducer"], Any]) -> list[Any]:
        """Run the function on every rank at once; return what each returned."""

        def guarded(rank: int) -> Any:
            try:
                return rank_main(ThreadReducer(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.num_ranks)]
        broken = [future.exception() for future in futures if future.exception() is not None]
        for error in broken:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class ThreadReducer:
    """One rank's view of ThreadRanks."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.num_ranks = ranks.num_ranks
        self.gpu_obstacle: str | None = None

    def _exchange(self, value: Any) -> list[Any]:
        self._ranks.board[self.rank] = value
        self._ranks.barrier.wait(timeout=30)
        values = list(self._ranks.board)
        self._ranks.barrier.wait(timeout=30)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add the values of all ranks."""
        return torch.stack(self._exchange(values.clone())).sum(dim=0)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self._exchange(value)[0]

    def broadcast_model(self, model: nn.Module) -> None:
        """Take rank 0's weights."""
        model.load_state_dict(self._exchange({name: value.clone() for name, value in model.state_dict().items()})[0])

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Average gradients in the step, zeros where there are none."""
        step = optimizer.step
        parameters = [parameter for _, parameter in named_parameters]

        def averaged_step() -> None:
            for parameter in parameters:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.sum(own) / self.num_ranks
            step()

        optimizer.step = averaged_step  # type: ignore[assignment, method-assign]
        return optimizer


class Recorder:
    """A learning rate that remembers the steps it was asked for."""

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate
        self.steps: list[int] = []

    def __call__(self, step: int) -> float:
        """Return the rate, and remember the step."""
        self.steps.append(step)
        return self.rate


def separable(num_rows: int = 30, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (B, 4) in float64 and labels that a linear model learns."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_rows) % NUM_CLASSES
    inputs = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
    inputs[torch.arange(num_rows), labels] += 4.0
    return inputs, labels


def linear(seed: int = 1) -> nn.Linear:
    """Return a linear model in float64."""
    torch.manual_seed(seed)
    return nn.Linear(4, NUM_CLASSES, dtype=torch.float64)


def steps_of(num_rows: int, batch_size: int) -> list[list[int]]:
    """Cut rows into batches."""
    return [list(range(begin, min(num_rows, begin + batch_size))) for begin in range(0, num_rows, batch_size)]


def fit_simply(
    model: nn.Module,
    train_loader: TensorLoader,
    val_loader: TensorLoader,
    progress: Progress,
    *,
    max_epochs: int = 5,
    monitor: str = "val_accuracy",
    rate: float = 0.1,
    reducer: Reducer | None = None,
    on_epoch: Callable[[EpochMetrics, Progress], None] = lambda metrics, progress: None,
) -> None:
    """Fit with plain gradient descent."""
    reducer = reducer or SingleProcess()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fit(
        model,
        train_loader,
        val_loader,
        reducer.wrap_optimizer(optimizer, model.named_parameters()),
        lambda step: rate,
        progress,
        max_epochs=max_epochs,
        monitor=monitor,
        num_classes=NUM_CLASSES,
        seed=1,
        device=CPU,
        reducer=reducer,
        on_epoch=on_epoch,
    )


def new_progress(patience: int = 2, *, higher_is_better: bool = True) -> Progress:
    """Return a training that has not begun."""
    return Progress(EarlyStopping(patience, 0.0, higher_is_better))


def test_learning_rate_is_asked_for_each_step_over_all_epochs() -> None:
    """Epoch 2 of 3 steps begins at step 6, and the optimizer gets what is answered."""
    inputs, labels = separable(9)
    model, recorder = linear(), Recorder(rate=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)

    loader = TensorLoader(inputs, labels, steps_of(9, 3))
    train_one_epoch(model, loader, optimizer, recorder, 2, CPU, SingleProcess())

    assert recorder.steps == [6, 7, 8]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_training_metrics_are_means_over_pictures() -> None:
    """Batches of different size weigh by their pictures: the loss is that of the whole split."""
    inputs, labels = separable(10)
    model = linear()
    loader = TensorLoader(inputs, labels, [[0, 1, 2, 3, 4, 5, 6, 7], [8], [9]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    loss, accuracy, _, wait = train_one_epoch(model, loader, optimizer, Recorder(0.0), 0, CPU, SingleProcess())

    logits = model(inputs).detach()
    assert loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-9)
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert 0.0 <= wait <= 1.0


def test_a_step_is_the_gradient_of_the_mean_loss() -> None:
    """One step of plain gradient descent is the textbook's."""
    inputs, labels = separable(6)
    model, textbook = linear(), linear()
    loader = TensorLoader(inputs, labels, [list(range(6))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    train_one_epoch(model, loader, optimizer, Recorder(0.5), 0, CPU, SingleProcess())

    functional.cross_entropy(textbook(inputs), labels).backward()
    assert textbook.weight.grad is not None
    assert torch.allclose(model.weight, textbook.weight - 0.5 * textbook.weight.grad, rtol=1e-12)


def test_empty_batches_change_nothing() -> None:
    """A step without pictures leaves weights and metrics as they are."""
    inputs, labels = separable(6)
    with_empty, without = linear(), linear()
    results = []
    for model, steps in ((with_empty, [[0, 1, 2], [], [3, 4, 5], []]), (without, [[0, 1, 2], [3, 4, 5]])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = TensorLoader(inputs, labels, steps)
        results.append(train_one_epoch(model, loader, optimizer, Recorder(), 0, CPU, SingleProcess())[:2])

    assert torch.equal(with_empty.weight, without.weight)
    assert results[0] == results[1]


def test_lone_picture_trains_with_batch_norm() -> None:
    """A last batch of one picture, of which batch norm can take no variance, trains all the same and counts once."""
    inputs, labels = separable(5)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)).double()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    loader = TensorLoader(inputs, labels, [[0, 1, 2, 3], [4]])
    loss, *_ = train_one_epoch(model, loader, optimizer, Recorder(), 0, CPU, SingleProcess())

    assert math.isfinite(loss)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("weight", "bias", "loss"), [(float("nan"), 0.0, "nan"), (0.0, -float("inf"), "inf")])
def test_loss_that_is_no_number_raises_diverged(weight: float, bias: float, loss: str) -> None:
    """A diverged training ends at once, and says what to do: also where the loss is infinite."""
    inputs, labels = separable(6)
    model = linear()
    with torch.no_grad():
        model.weight[0] = weight
        model.bias[0] = bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(inputs, labels, steps_of(6, 6))

    with pytest.raises(Diverged, match=f"the training loss of epoch 3 is {loss}: lower the learning rate"):
        train_one_epoch(model, loader, optimizer, Recorder(), 3, CPU, SingleProcess())


def test_confusion_matrix_counts_true_classes_in_rows() -> None:
    """A model that always says class 2 fills the last column with what there was."""
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    model = linear()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 0.0, 5.0]))
    loader = TensorLoader(torch.randn(6, 4, dtype=torch.float64), labels, [[0, 1, 2, 3], [], [4, 5]])

    found = evaluate(model, loader, NUM_CLASSES, CPU, SingleProcess())

    assert found.confusion_KK.tolist() == [[0, 0, 2], [0, 0, 1], [0, 0, 3]]
    assert found.accuracy == 0.5
    expected = functional.cross_entropy(model.bias.detach().repeat(6, 1), labels)
    assert found.loss == pytest.approx(float(expected), rel=1e-9)


def test_evaluation_leaves_the_model_as_it_was() -> None:
    """Batch norm's running statistics do not learn from validation pictures."""
    inputs, labels = separable(6)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    model.train()
    evaluate(model, TensorLoader(inputs, labels, steps_of(6, 3)), NUM_CLASSES, CPU, SingleProcess())

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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


def test_every_rank_sees_the_metrics_of_all() -> None:
    """Ranks with different pictures get one confusion matrix, so that all stop in the same epoch."""
    inputs, labels = separable(12)
    shares = [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9, 10, 11]]]

    def rank_main(reducer: ThreadReducer) -> Evaluation:
        return evaluate(linear(), TensorLoader(inputs, labels, shares[reducer.rank]), NUM_CLASSES, CPU, reducer)

    first, second = ThreadRanks(2).run(rank_main)

    assert torch.equal(first.confusion_KK, second.confusion_KK)
    assert first.loss == second.loss
    assert int(first.confusion_KK.sum()) == 12


def test_divergence_on_one_rank_ends_all() -> None:
    """A rank whose own pictures are fine raises too, instead of waiting for the other."""
    inputs, labels = separable(6)
    inputs[5] = float("nan")

    def rank_main(reducer: ThreadReducer) -> str:
        loader = TensorLoader(inputs, labels, [[reducer.rank * 5]], [2])
        optimizer = torch.optim.SGD(linear().parameters(), lr=0.0)
        with pytest.raises(Diverged) as diverged:
            train_one_epoch(linear(), loader, optimizer, Recorder(), 0, CPU, reducer)
        return str(diverged.value)

    assert len(set(ThreadRanks(2).run(rank_main))) == 1


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
    """Each rank saw its own pictures; after every epoch all have the mean of what they saw."""
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

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches."""
        for batch in super().epoch(number):
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
