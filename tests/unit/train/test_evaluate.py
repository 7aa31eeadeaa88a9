"""The evaluation in detail: that of each epoch, with calibration and mistakes, the same on any number of ranks."""

import pytest
import torch

from tasks.train.evaluate import DetailedEvaluation, evaluate, evaluate_in_detail
from tasks.train.mistakes import NUM_MISTAKES
from tasks.train.reduce import SingleProcess
from tests.thread_ranks import ThreadRanks, ThreadReducer
from tests.unit.train.test_loop import CPU, NUM_CLASSES, TensorLoader, linear, separable

ROWS = 60


def test_detail_changes_no_metric() -> None:
    """Loss, confusion matrix and accuracy are those of `evaluate`, to the last digit."""
    inputs, labels = separable(ROWS)
    loader = TensorLoader(inputs, labels, [range(40), [], range(40, ROWS)])

    plain = evaluate(linear(), loader, NUM_CLASSES, CPU, SingleProcess())
    found = evaluate_in_detail(linear(), loader, NUM_CLASSES, CPU, SingleProcess())

    assert found.loss == plain.loss
    assert torch.equal(found.confusion_KK, plain.confusion_KK)
    assert found.top5_accuracy == plain.top5_accuracy


def test_detail_agrees_with_the_metrics() -> None:
    """Its mistakes are those of the confusion matrix, its bins hold every picture, and their hits are the accuracy."""
    inputs, labels = separable(20)
    loader = TensorLoader(inputs, labels, [range(20)])
    model = linear()

    found = evaluate_in_detail(model, loader, NUM_CLASSES, CPU, SingleProcess())

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
def test_ranks_agree_with_one_process(num_ranks: int) -> None:
    """However the pictures are shared out; the last of five ranks has none."""
    inputs, labels = separable(ROWS)
    model = linear()
    alone = evaluate_in_detail(model, TensorLoader(inputs, labels, [range(ROWS)]), NUM_CLASSES, CPU, SingleProcess())

    def rank_main(reducer: ThreadReducer) -> DetailedEvaluation:
        rows = [row for row in range(ROWS) if row % min(num_ranks, 4) == reducer.rank]
        return evaluate_in_detail(model, TensorLoader(inputs, labels, [rows]), NUM_CLASSES, CPU, reducer)

    for found in ThreadRanks(num_ranks).run(rank_main):
        assert torch.equal(found.confusion_KK, alone.confusion_KK)
        assert found.calibration.error == pytest.approx(alone.calibration.error)
        assert torch.equal(found.calibration.counts, alone.calibration.counts)
        assert [mistake.row for mistake in found.mistakes] == [mistake.row for mistake in alone.mistakes]
        assert [mistake.loss for mistake in found.mistakes] == pytest.approx([m.loss for m in alone.mistakes])
