"""Learning curves: the error of the probe as a power law of the number of training images, with its uncertainty."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

NUM_DRAWS = 2000
"""Curves that are drawn; quantiles of them are the intervals."""

INTERVAL = (0.025, 0.5, 0.975)
"""Quantiles of the 95 % interval, and of the expected value."""

PRIOR_WEIGHT = 0.1
"""Weight of an exponent drawn from 0 to 1 beside the measured one; a halving of the images weighs log(2)^2 = 0.48.

Hestness et al. (2017) found exponents from 0.07 to 0.35 for whole networks; a linear probe learns faster.
"""

MAX_EXPONENT = 2.0

HEAD_ERROR = (-0.005, 0.01)
"""Bounds of the error of a trained head minus that of the probe; tests/benchmarks/LOG.md has measured differences."""


@dataclass(frozen=True)
class Curves:
    """D draws of the curve error(n) = a + (e - a) (n / m)^-c, where m is the largest measured number of images."""

    largest: float
    error_D: Values
    """The error e at m."""
    asymptote_D: Values
    """The error a that more images do not reduce, from 0 to e."""
    exponent_D: Values
    """The exponent c, from 0 to MAX_EXPONENT."""

    def at(self, images: float) -> Values:
        """Return the error of each draw after training on so many images, (D,)."""
        grown = (max(images, 1.0) / self.largest) ** -self.exponent_D
        return np.minimum(self.asymptote_D + (self.error_D - self.asymptote_D) * grown, 1.0)


def draw_errors(wrong_RSN: npt.NDArray[np.bool_], rng: np.random.Generator) -> Values:
    """Return draws of the error of each share, (D, S): a Bayesian bootstrap of images and repeats (Rubin 1981).

    Two images are added, one always wrong and the other always right, each with the weight of half an image, so that no
    error is exactly 0 or 1: Jeffreys' prior of a proportion.

    Args:
        wrong_RSN: Whether the answer about each of N images is wrong, by repeat and share.
        rng: Generator of the weights.
    """
    num_repeats, num_shares, num_images = wrong_RSN.shape
    ends_RSE = np.broadcast_to([0.0, 1.0], (num_repeats, num_shares, 2))
    wrong_TN = np.concatenate([wrong_RSN, ends_RSE], axis=2).reshape(num_repeats * num_shares, -1)
    weights_DN = rng.gamma(np.append(np.ones(num_images), [0.5, 0.5]), size=(NUM_DRAWS, num_images + 2))
    weights_DR = rng.gamma(1.0, size=(NUM_DRAWS, num_repeats))
    errors_DRS = (weights_DN @ wrong_TN.T).reshape(-1, num_repeats, num_shares) / weights_DN.sum(1)[:, None, None]
    drawn: Values = np.einsum("drs,dr->ds", errors_DRS, weights_DR / weights_DR.sum(1, keepdims=True))
    return drawn


def fit_curves(sizes_S: Values, errors_DS: Values, rng: np.random.Generator) -> Curves:
    """Return a curve through each draw of the errors.

    Few shares do not determine the asymptote. Each draw has one at random, from 0 to the last error, so that the
    interval covers curves that fall on and curves that end.

    Args:
        sizes_S: Training images of each share, ascending.
        errors_DS: Errors (0-1) of each draw.
        rng: Generator of asymptotes and exponents.
    """
    last_D = errors_DS[:, -1]
    asymptote_D = rng.uniform(0.0, 1.0, len(last_D)) * last_D
    # Noise may let a larger share have a larger error: the exponent is not below 0.
    above_DS = np.maximum(errors_DS, last_D[:, None]) - asymptote_D[:, None]
    steps_S, rises_DS = np.log(sizes_S / sizes_S[-1]), np.log(above_DS / above_DS[:, -1:])
    prior_D = rng.uniform(0.0, 1.0, len(last_D))
    fitted_D = (PRIOR_WEIGHT * prior_D - rises_DS @ steps_S) / (PRIOR_WEIGHT + steps_S @ steps_S)
    return Curves(float(sizes_S[-1]), last_D, asymptote_D, np.clip(fitted_D, 0.0, MAX_EXPONENT))


def expected_accuracy(errors_D: Values, num_tested: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return the expected accuracy of a head and the 95 % interval of the one to be measured: low, median, high.

    Args:
        errors_D: Draws of the probe's error.
        num_tested: Images that will measure the accuracy, at least 1, whose choice is part of the uncertainty.
        rng: Generator of heads and tests.
    """
    accuracy_D = 1.0 - np.clip(errors_D + rng.uniform(*HEAD_ERROR, len(errors_D)), 0.0, 1.0)
    # Spread within the steps of 1 / num_tested, so that quantiles do not jump.
    spread_D = rng.uniform(-0.5, 0.5, len(errors_D))
    measured_D = (rng.binomial(num_tested, accuracy_D) + spread_D) / num_tested
    low, high = np.quantile(measured_D, [INTERVAL[0], INTERVAL[2]]).clip(0.0, 1.0)
    return float(low), float(np.median(accuracy_D)), float(high)
