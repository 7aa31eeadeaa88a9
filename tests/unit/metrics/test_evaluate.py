"""Metrics of a split and the detailed evaluation, which are equal on any number of ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tasks.collectives.reducer import Reducer
from tasks.metrics.evaluate import DetailedEvaluation, Evaluation, evaluate, evaluate_in_detail
from tasks.metrics.mistakes import NUM_MISTAKES
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer
from tests.fakes.tiny_training import CPU, NUM_CLASSES, TensorLoader, linear, separable, steps_of

ROWS = 60


def test_confusion_matrix_counts_true_classes_in_rows() -> None:
    """A model that always predicts class 2 fills the last column with the counts of the true classes."""
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    model = linear()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 0.0, 5.0]))
    loader = TensorLoader(torch.randn(6, 4, dtype=torch.float64), labels, [[0, 1, 2, 3], [], [4, 5]])

    found = evaluate(model, loader, NUM_CLASSES, CPU, Reducer())

    assert found.confusion_KK.tolist() == [[0, 0, 2], [0, 0, 1], [0, 0, 3]]
    assert found.accuracy == 0.5
    expected = functional.cross_entropy(model.bias.detach().repeat(6, 1), labels)
    assert found.loss == pytest.approx(float(expected), rel=1e-9)


def test_macro_f1_is_the_mean_over_classes_with_images() -> None:
    """A class without images in the split is left out of the macro F1, and a class without hits counts as 0."""
    confusion = torch.tensor([[3, 1, 0], [1, 5, 0], [0, 0, 0]])
    assert Evaluation(0.5, confusion, 1.0, 0.5).macro_f1 == pytest.approx((3 / 4 + 5 / 6) / 2)
    confusion = torch.tensor([[3, 1, 0], [1, 5, 0], [2, 0, 0]])
    assert Evaluation(0.5, confusion, 1.0, 0.5).macro_f1 == pytest.approx((0.6 + 5 / 6 + 0.0) / 3)


def test_top5_accuracy_counts_labels_among_the_five_highest_logits() -> None:
    """With seven classes and descending logits, labels 0 to 4 are in the top five, and 5 and 6 are not."""
    labels = torch.arange(7)
    logits = torch.arange(7, 0, -1, dtype=torch.float64).repeat(7, 1)

    found = evaluate(nn.Identity(), TensorLoader(logits, labels, [[0, 1, 2], [3, 4, 5, 6]]), 7, CPU, Reducer())

    assert found.top5_accuracy == pytest.approx(5 / 7)
    assert found.accuracy == pytest.approx(1 / 7)


def test_top5_accuracy_is_one_for_up_to_five_classes() -> None:
    """The top-5 accuracy is 1 if there are no more than five classes."""
    inputs, labels = separable(9)
    found = evaluate(linear(), TensorLoader(inputs, labels, steps_of(9, 4)), NUM_CLASSES, CPU, Reducer())
    assert found.top5_accuracy == 1.0


def test_evaluation_does_not_change_the_model() -> None:
    """Evaluation does not update the running statistics of batch norm."""
    inputs, labels = separable(6)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    model.train()
    evaluate(model, TensorLoader(inputs, labels, steps_of(6, 3)), NUM_CLASSES, CPU, Reducer())

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_rank_gets_the_metrics_over_all_ranks() -> None:
    """Ranks with different images get the same metrics, so that all stop in the same epoch."""
    inputs, labels = separable(12)
    shares = [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9, 10, 11]]]

    def rank_main(reducer: ThreadReducer) -> Evaluation:
        return evaluate(linear(), TensorLoader(inputs, labels, shares[reducer.rank]), NUM_CLASSES, CPU, reducer)

    first, second = ThreadRanks(2).run(rank_main)

    assert torch.equal(first.confusion_KK, second.confusion_KK)
    assert first.loss == second.loss
    assert int(first.confusion_KK.sum()) == 12


def test_detailed_evaluation_equals_evaluate() -> None:
    """Loss, confusion matrix and top-5 accuracy equal those of `evaluate` exactly."""
    inputs, labels = separable(ROWS)
    loader = TensorLoader(inputs, labels, [range(40), [], range(40, ROWS)])

    plain = evaluate(linear(), loader, NUM_CLASSES, CPU, Reducer())
    found = evaluate_in_detail(linear(), loader, NUM_CLASSES, CPU, Reducer())

    assert found.loss == plain.loss
    assert torch.equal(found.confusion_KK, plain.confusion_KK)
    assert found.top5_accuracy == plain.top5_accuracy


def test_mistakes_and_calibration_agree_with_the_metrics() -> None:
    """The mistakes are the misclassified images, and the calibration's counts agree with the accuracy."""
    inputs, labels = separable(20)
    loader = TensorLoader(inputs, labels, [range(20)])
    model = linear()

    found = evaluate_in_detail(model, loader, NUM_CLASSES, CPU, Reducer())

    probabilities = model(inputs).detach().softmax(dim=1)
    wrong = (probabilities.argmax(1) != labels).nonzero().flatten().tolist()
    assert 0 < len(wrong) <= NUM_MISTAKES
    assert sorted(mistake.row for mistake in found.mistakes) == wrong
    for mistake in found.mistakes:
        assert mistake.true == labels[mistake.row]
        assert mistake.predicted == probabilities[mistake.row].argmax()
        assert mistake.probability == pytest.approx(float(probabilities[mistake.row].max()))
    assert int(found.calibration.counts.sum()) == 20
    assert float(found.calibration.correct.sum()) / 20 == pytest.approx(found.accuracy)
    assert found.calibration.mean_confidence == pytest.approx(float(probabilities.max(dim=1).values.mean()))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_detailed_evaluation_on_ranks_equals_one_process(num_ranks: int) -> None:
    """Metrics, calibration and mistakes equal those of one process, even if a rank (the last of five) has no image."""
    inputs, labels = separable(ROWS)
    model = linear()
    alone = evaluate_in_detail(model, TensorLoader(inputs, labels, [range(ROWS)]), NUM_CLASSES, CPU, Reducer())

    def rank_main(reducer: ThreadReducer) -> DetailedEvaluation:
        rows = [row for row in range(ROWS) if row % min(num_ranks, 4) == reducer.rank]
        return evaluate_in_detail(model, TensorLoader(inputs, labels, [rows]), NUM_CLASSES, CPU, reducer)

    for found in ThreadRanks(num_ranks).run(rank_main):
        assert torch.equal(found.confusion_KK, alone.confusion_KK)
        assert found.calibration.error == pytest.approx(alone.calibration.error)
        assert torch.equal(found.calibration.counts, alone.calibration.counts)
        assert [mistake.row for mistake in found.mistakes] == [mistake.row for mistake in alone.mistakes]
        assert [mistake.loss for mistake in found.mistakes] == pytest.approx([m.loss for m in alone.mistakes])
