"""Temperature scaling: the divisor of the logits with which probabilities agree best with accuracy.

Guo et al., "On Calibration of Modern Neural Networks", 2017, arXiv:1706.04599, section 4.2. The order of the classes,
and with it the accuracy, does not change.
"""

import torch

from tasks.collectives import Reducer

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
