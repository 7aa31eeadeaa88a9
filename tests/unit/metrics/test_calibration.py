"""Calibration in bins, compared with values calculated by hand."""

import math

import pytest
import torch

from tasks.collectives.reducer import Reducer
from tasks.metrics.calibration import NUM_BINS, Calibration, CalibrationSums

CPU = torch.device("cpu")


def calibration_of(confidence: list[float], correct: list[bool]) -> Calibration:
    """Return the calibration of predictions, added one by one."""
    sums = CalibrationSums(CPU)
    for probability, right in zip(confidence, correct, strict=True):
        sums.add(torch.tensor([probability], dtype=torch.float64), torch.tensor([right]))
    return sums.reduce(Reducer())


def test_error_is_the_mean_gap_between_probability_and_accuracy() -> None:
    """Two predictions at 0.95, one right, have a gap of 0.45, and so has a right prediction at 0.55."""
    found = calibration_of([0.95, 0.95, 0.55], [True, False, True])

    assert found.error == pytest.approx(0.45)
    assert found.mean_confidence == pytest.approx(2.45 / 3)
    assert found.counts.nonzero().flatten().tolist() == [8, 14]
    assert found.bin_accuracy[[8, 14]].tolist() == [1.0, 0.5]
    assert found.bin_confidence[[8, 14]].tolist() == pytest.approx([0.55, 0.95])


def test_gaps_cancel_within_a_bin_only() -> None:
    """Half right at 0.5 has an error of 0; over- and underconfidence in different bins add up."""
    assert calibration_of([0.5, 0.5], [True, False]).error == pytest.approx(0.0)
    assert calibration_of([0.9, 0.6], [False, True]).error == pytest.approx((0.9 + 0.4) / 2)


def test_bins_are_closed_on_the_right() -> None:
    """The probability 0.2 belongs to the third of 15 bins, which it bounds, and 1 to the last."""
    found = calibration_of([0.2, 0.21, 1.0], [True, True, True])

    assert found.counts.nonzero().flatten().tolist() == [2, 3, NUM_BINS - 1]


def test_error_without_images_is_nan() -> None:
    """The error of no predictions is NaN, and nothing is raised."""
    assert math.isnan(CalibrationSums(CPU).reduce(Reducer()).error)
