"""Calibration: whether a model that is 80 % sure is right in 80 of 100 cases."""

from dataclasses import dataclass

import torch

from tasks.collectives import Reducer

NUM_BINS = 15
"""Of equal width, as in Guo et al., "On Calibration of Modern Neural Networks" (2017, arXiv:1706.04599)."""


@dataclass(frozen=True)
class Calibration:
    """Predictions of one split over all ranks, in bins by the probability of the predicted class.

    Bin m of M = 15 holds the probabilities in (m / M, (m + 1) / M]. All three are sums, float64 of shape (15,).
    """

    counts: torch.Tensor
    """Images."""
    correct: torch.Tensor
    """Those whose predicted class is the true one."""
    confidence: torch.Tensor
    """Probabilities of the predicted classes."""

    @property
    def bin_accuracy(self) -> torch.Tensor:
        """Share of right predictions of each bin, float64 (15,); NaN where a bin has none."""
        return self.correct / self.counts

    @property
    def bin_confidence(self) -> torch.Tensor:
        """Mean probability of the predicted class of each bin, float64 (15,); NaN where a bin has none."""
        return self.confidence / self.counts

    @property
    def error(self) -> float:
        """Expected calibration error (0-1): Guo et al. 2017, equation 3.

        The mean over images of how far a bin's accuracy is from its mean probability; NaN of no images.
        """
        return float((self.correct - self.confidence).abs().sum() / self.counts.sum())

    @property
    def mean_confidence(self) -> float:
        """Mean probability of the predicted class (0-1); above the accuracy, the model is too sure of itself."""
        return float(self.confidence.sum() / self.counts.sum())


class CalibrationSums:
    """Collects what a rank predicts."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros((NUM_BINS, 3), dtype=torch.float64, device=device)

    def add(self, confidence_B: torch.Tensor, correct_B: torch.Tensor) -> None:
        """Take in the probabilities of the predicted classes, and which of them are right."""
        bins_B = (confidence_B * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1)
        values = torch.stack([torch.ones_like(confidence_B), correct_B.to(confidence_B), confidence_B], dim=1)
        self._sums.index_add_(0, bins_B, values.double())

    def reduce(self, reducer: Reducer) -> Calibration:
        """Return the sums over all ranks, all of which call this."""
        counts, correct, confidence = reducer.sum(self._sums.cpu()).unbind(dim=1)
        return Calibration(counts, correct, confidence)
