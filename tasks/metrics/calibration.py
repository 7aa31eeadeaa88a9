"""Calibration: agreement of predicted probabilities with accuracy, in bins."""

from dataclasses import dataclass

import torch

from tasks.collectives import Reducer

NUM_BINS = 15
"""Number of equal-width bins (Guo et al., "On Calibration of Modern Neural Networks", 2017, arXiv:1706.04599)."""


@dataclass(frozen=True)
class Calibration:
    """Predictions of one split over all ranks, binned by the probability of the predicted class.

    Bin m of M = 15 holds the probabilities in (m / M, (m + 1) / M]. All attributes are sums, float64 of shape (15,).
    """

    counts: torch.Tensor
    """Number of images per bin."""
    correct: torch.Tensor
    """Number of images per bin whose predicted class is the true class."""
    confidence: torch.Tensor
    """Sum of the probabilities of the predicted classes per bin."""

    @property
    def bin_accuracy(self) -> torch.Tensor:
        """Accuracy of each bin, float64 (15,); NaN where a bin is empty."""
        return self.correct / self.counts

    @property
    def bin_confidence(self) -> torch.Tensor:
        """Mean probability of the predicted class in each bin, float64 (15,); NaN where a bin is empty."""
        return self.confidence / self.counts

    @property
    def error(self) -> float:
        """Expected calibration error (0-1): Guo et al. 2017, equation 3.

        The mean over images of the difference between their bin's accuracy and mean probability; NaN without images.
        """
        return float((self.correct - self.confidence).abs().sum() / self.counts.sum())

    @property
    def mean_confidence(self) -> float:
        """Mean probability of the predicted class (0-1); above the accuracy, the model is overconfident."""
        return float(self.confidence.sum() / self.counts.sum())


class CalibrationSums:
    """Accumulator of the predictions of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros((NUM_BINS, 3), dtype=torch.float64, device=device)

    def add(self, confidence_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Add the probabilities of the predicted classes, and whether each prediction is correct."""
        bins_B = (confidence_B * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
        values = torch.stack([torch.ones_like(confidence_B), correct_B.to(confidence_B), confidence_B], dim=1)
        self._sums.index_add_(0, bins_B, values.double())

    def reduce(self, reducer: Reducer) -> Calibration:
        """Return the sums over all ranks; a collective operation."""
        counts, correct, confidence = reducer.sum(self._sums.cpu()).unbind(dim=1)
        return Calibration(counts, correct, confidence)
