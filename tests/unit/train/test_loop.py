"""The training loop with tiny networks, loaders of tensors and ranks that are threads."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import Batch
from tasks.train import loop
from tasks.train.early_stopping import EarlyStopping
from tasks.train.evaluate import Evaluation, evaluate
from tasks.train.finite import Diverged
from tasks.train.loop import average_buffers, fit, train_one_epoch
from tasks.train.progress import EpochMetrics, Progress
from tasks.train.reduce import Reducer, SingleProcess
from tasks.train.step import StepSettings
from tests.thread_ranks import ThreadRanks, ThreadReducer

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

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return how many pictures all ranks have in the step."""
        assert start == 0
        return self._global_rows[step]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches."""
        assert start == 0
        for rows in self._steps:
            chosen = torch.tensor(list(rows), dtype=torch.int64)
            yield Batch(self._inputs[chosen], self._labels[chosen], np.array(rows, dtype=np.int64))


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

    trained = train_one_epoch(model, loader, optimizer, Recorder(0.0), 0, CPU, SingleProcess())

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
            Recorder(1.0),
            0,
            CPU,
            SingleProcess(),
            StepSettings(max_gradient_norm=bound),
        )
        moves.append(before - nn.utils.parameters_to_vector(model.parameters()).detach())
        assert trained.gradient_norm == pytest.approx(float(moves[0].norm()))

    assert float(moves[1].norm()) == pytest.approx(1e-3, rel=1e-3)
    assert torch.allclose(moves[1] / moves[1].norm(), moves[0] / moves[0].norm())
    assert torch.equal(moves[2], moves[0])


def test_ranks_bound_the_average_of_their_gradients() -> None:
    """Not each its own: they take the step of one process on all pictures."""
    inputs, labels = separable(8)
    settings = StepSettings(label_smoothing=0.1, max_gradient_norm=1e-3)

    # Made here: torch's generator is the process's, and ranks that are threads would draw from it in turns.
    models = [linear(), linear(), linear()]

    def train(loader: TensorLoader, reducer: Reducer) -> tuple[torch.Tensor, float]:
        model = models.pop()
        optimizer = reducer.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        trained = train_one_epoch(model, loader, optimizer, Recorder(1.0), 0, CPU, reducer, settings)
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
        model, loader, optimizer, Recorder(0.0), 0, CPU, SingleProcess(), StepSettings(label_smoothing=0.2)
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
        trained = train_one_epoch(model, loader, optimizer, Recorder(), 0, CPU, SingleProcess())
        results.append((trained.loss, trained.accuracy))

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
    loss = train_one_epoch(model, loader, optimizer, Recorder(), 0, CPU, SingleProcess()).loss

    assert math.isfinite(loss)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("weight", "bias", "loss"), [(float("nan"), 0.0, "nan"), (0.0, -float("inf"), "inf")])
def test_loss_that_is_no_number_ends_the_step_and_names_the_layer(weight: float, bias: float, loss: str) -> None:
    """Also where it is infinite; the rows of the step are told, of which the caller knows the pictures."""
    inputs, labels = separable(6)
    model = nn.Sequential(nn.ReLU(), linear())
    with torch.no_grad():
        model[1].weight[0] = weight
        model[1].bias[0] = bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = TensorLoader(inputs, labels, [[3, 0, 4], [1, 2, 5]])
    why = "weight" if math.isnan(weight) else "bias"

    with pytest.raises(Diverged) as diverged:
        train_one_epoch(model, loader, optimizer, Recorder(), 3, CPU, SingleProcess())

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
        train_one_epoch(model, loader, optimizer, Recorder(0.0), 0, CPU, SingleProcess())

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
        train_one_epoch(model, TensorLoader(inputs, labels, [range(6)]), optimizer, Recorder(), 1, CPU, SingleProcess())

    assert diverged.value.rows == [0, 1, 2, 3, 4, 5]
    assert bool(model.scale.isfinite().all())


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


def test_macro_f1_is_over_the_classes_that_are_present() -> None:
    """A class without a picture in the split says nothing about the model; one that is never right counts as 0."""
    confusion = torch.tensor([[3, 1, 0], [1, 5, 0], [0, 0, 0]])
    assert Evaluation(0.5, confusion, 1.0).macro_f1 == pytest.approx((3 / 4 + 5 / 6) / 2)
    confusion = torch.tensor([[3, 1, 0], [1, 5, 0], [2, 0, 0]])
    assert Evaluation(0.5, confusion, 1.0).macro_f1 == pytest.approx((0.6 + 5 / 6 + 0.0) / 3)


def test_top5_accuracy_counts_a_class_among_the_first_five() -> None:
    """Of seven classes the logits fall from the first to the last: labels 0 to 4 are among five, 5 and 6 are not."""
    labels = torch.arange(7)
    logits = torch.arange(7, 0, -1, dtype=torch.float64).repeat(7, 1)

    found = evaluate(nn.Identity(), TensorLoader(logits, labels, [[0, 1, 2], [3, 4, 5, 6]]), 7, CPU, SingleProcess())

    assert found.top5_accuracy == pytest.approx(5 / 7)
    assert found.accuracy == pytest.approx(1 / 7)


def test_of_five_classes_or_fewer_every_picture_is_among_the_first_five() -> None:
    """There is nothing else it could be."""
    inputs, labels = separable(9)
    found = evaluate(linear(), TensorLoader(inputs, labels, steps_of(9, 4)), NUM_CLASSES, CPU, SingleProcess())
    assert found.top5_accuracy == 1.0


@pytest.mark.parametrize("monitor", ["val_accuracy", "val_macro_f1", "val_top5_accuracy"])
def test_early_stopping_watches_the_metric_it_is_told(monitor: str) -> None:
    """Its best value is that of the history's best epoch."""
    inputs, labels = separable(12)
    loader, progress = TensorLoader(inputs, labels, steps_of(12, 4)), new_progress(patience=20)

    fit_simply(linear(), loader, loader, progress, max_epochs=6, monitor=monitor, rate=0.02)

    values = [getattr(metrics, monitor) for metrics in progress.history]
    assert progress.stopping.best == max(values) == values[progress.stopping.best_epoch]


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
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pytest.raises(Diverged) as diverged:
            train_one_epoch(model, loader, optimizer, Recorder(), 0, CPU, reducer)
        return f"{diverged.value} {diverged.value.rows}"

    (said,) = set(ThreadRanks(2).run(rank_main))
    assert "the training loss of epoch 0, step 0 is nan" in said
    assert said.endswith("[5]")  # the row of the rank that had it


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


def test_gradients_that_were_no_numbers_some_steps_ago_are_named_by_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is seen later; the pictures are still those of the step in which it came."""
    monkeypatch.setattr(loop, "is_look", lambda step, num_steps, device: step == num_steps - 1)
    inputs, labels = separable(8)
    inputs[3, 0] = float("nan")
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = TensorLoader(inputs, labels, [[0, 1], [2, 3], [4, 5], [6, 7]])

    with pytest.raises(Diverged, match="of epoch 0, step 1 were no numbers, as seen after step 3") as diverged:
        train_one_epoch(model, loader, optimizer, Recorder(), 0, CPU, SingleProcess())

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


def test_any_seed_of_the_form_can_be_trained_with() -> None:
    """Every step draws from a seed of its own, made of this one."""
    inputs, labels = separable(6)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = StepSettings(seed=2**32 - 1)

    loss = train_one_epoch(
        model, TensorLoader(inputs, labels, [range(6)]), optimizer, Recorder(), 9999, CPU, SingleProcess(), settings
    ).loss

    assert math.isfinite(loss)
