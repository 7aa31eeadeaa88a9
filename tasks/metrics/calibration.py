"""Calibration of probabilities in bins, the temperature that gives the best, and thresholds of images of no class.

The temperature divides the logits: Guo et al., "On Calibration of Modern Neural Networks", 2017, arXiv:1706.04599,
section 4.2. The order of the classes, and with it the accuracy, does not change.

Of n images of the classes, an image like them scores above all but the k highest with a probability of k / (n + 1) at
most: Angelopoulos and Bates, "A Gentle Introduction to Conformal Prediction", 2021, arXiv:2107.07511, section 1.
"""

import math
from dataclasses import dataclass

import torch

from tasks.collectives.reducer import Reducer, gather_rows
from tasks.model_package.description import RATES
from tasks.model_package.serving import unknown_scores

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


MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
NUM_POINTS = 121
"""Points of the logarithmic grid: a factor of 1.05, so that the interpolation between two is exact to 0.1 %."""


class TemperatureSums:
    """Accumulator of a rank's slopes of the negative log-likelihood, at every point of a grid of inverse temperatures.

    The likelihood is convex in the inverse temperature b. Its slope is E_b[z] - z_y per image: the mean of the logits z
    under the probabilities softmax(b z), less the logit of the true class y. One pass finds its root. A copy of all
    logits, for many classes, would not fit into memory.
    """

    def __init__(self, device: torch.device) -> None:
        ends = torch.tensor([1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE], dtype=torch.float64).log()
        self._grid = torch.linspace(float(ends[0]), float(ends[1]), NUM_POINTS, dtype=torch.float64).exp()
        self._means = torch.zeros(NUM_POINTS, dtype=torch.float64, device=device)
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, labels_B: torch.Tensor, logits_BK: torch.Tensor) -> None:
        """Add a batch."""
        true_B = logits_BK.gather(1, labels_B[:, None])[:, 0].double()
        total_B = logits_BK.double().sum(dim=1)
        others_B = (total_B - true_B) / (logits_BK.shape[1] - 1)
        mistakes_B = (logits_BK.argmax(dim=1) != labels_B).double()
        self._sums += torch.stack([torch.ones_like(true_B), true_B, others_B, mistakes_B], dim=1).sum(dim=0)
        for point, inverse in enumerate(self._grid.tolist()):
            # One point after the other: all at once would need as many copies of the logits.
            self._means[point] += (torch.softmax(logits_BK * inverse, dim=1) * logits_BK).sum(dtype=torch.float64)

    def reduce(self, reducer: Reducer) -> float:
        """Return the temperature over all ranks, with 4 decimals; a collective operation. 1 without images.

        For a model that makes no mistake on N images, the temperature of the highest likelihood is 0. There, the true
        class has the target 1 - e instead of 1, and the others share e = 1 / (N + 2). These targets are those of Platt,
        "Probabilistic Outputs for Support Vector Machines", 1999, section 2.2. With mistakes they would only bias it:
        measured on digits and photos (tests/benchmarks/LOG.md).
        """
        summed = reducer.sum(torch.cat([self._sums, self._means]).cpu())
        num_images, true, others, mistakes = summed[:4].tolist()
        if not num_images:
            return 1.0
        spare = 0.0 if mistakes else 1 / (num_images + 2)
        # Rounded, so that it does not depend on the order in which the ranks' sums are added.
        return round(1 / _root(self._grid, summed[4:] - (1 - spare) * true - spare * others), 4)


def _root(grid: torch.Tensor, slopes: torch.Tensor) -> float:
    """Return where the increasing slopes are 0, between two points of the grid by linear interpolation."""
    after = int((slopes < 0).sum())
    if after in (0, len(grid)):
        return float(grid[min(after, len(grid) - 1)])
    (low, high), (below, above) = grid[after - 1 : after + 1].tolist(), slopes[after - 1 : after + 1].tolist()
    return float(low + (high - low) * below / (below - above))


@dataclass(frozen=True)
class Scores:
    """Scores of the images of a split, `unknown_scores`, over all ranks."""

    ascending: torch.Tensor
    """The scores, float64 (N,)."""

    def share_above(self, threshold: float) -> float:
        """Return the fraction of the images with a score above a threshold; NaN without images."""
        return float((self.ascending > threshold).double().mean())

    def thresholds(self) -> tuple[float, ...] | None:
        """Return the threshold of each of RATES, rounded up to 6 decimals; None without images.

        The threshold is 1, which no score exceeds, where the images are too few for the rate.
        """
        if not (num := len(self.ascending)):
            return None
        # Number of images that are not above; rounded, as 0.95 * 100 may be above 95.
        needed = [math.ceil(round((1 - rate) * (num + 1), 9)) for rate in RATES]
        # Up, so that the same image in another batch, with sums in another order, is not above.
        return tuple(
            1.0 if number > num else min(1.0, math.ceil(1e6 * float(self.ascending[number - 1])) / 1e6)
            for number in needed
        )


class ScoreSums:
    """Accumulator of the scores of a rank's images: 8 MB for a million."""

    def __init__(self, device: torch.device) -> None:
        self._parts = [torch.zeros(0, dtype=torch.float64, device=device)]

    def add(self, logits_BK: torch.Tensor) -> None:
        """Add a batch, by its logits before the temperature divides them."""
        self._parts.append(unknown_scores(logits_BK))

    def reduce(self, reducer: Reducer) -> Scores:
        """Return the scores over all ranks; a collective operation."""
        return Scores(gather_rows(reducer, torch.cat(self._parts).cpu()).sort().values)
