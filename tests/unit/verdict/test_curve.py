"""Learning curves: power laws through drawn errors, and the interval of the accuracy."""

import numpy as np
import pytest

from tasks.verdict.curve import draw_errors, expected_accuracy, fit_curves

SIZES = np.array([100.0, 200.0, 400.0, 800.0])


def wrong_answers(errors: list[float], num_images: int = 1000, num_repeats: int = 2) -> np.ndarray:
    """Return wrong answers about images, (R, S, N), of which these fractions are wrong; shares are nested."""
    hardness = (np.arange(num_images) + 0.5) / num_images
    return np.broadcast_to(hardness < np.array(errors)[:, None], (num_repeats, len(errors), num_images))


@pytest.mark.parametrize(("asymptote", "exponent"), [(0.0, 0.4), (0.03, 0.8), (0.08, 1.0)])
def test_power_law_is_covered_at_four_times_the_images(asymptote, exponent):
    """The interval has the error of the law that the measured ones follow, and is at most 10 points wide."""
    law = asymptote + 0.2 * (SIZES / 100) ** -exponent
    rng = np.random.default_rng(1)

    curves = fit_curves(SIZES, draw_errors(wrong_answers(law.tolist(), 4000), rng), rng)
    least, most = np.quantile(curves.at(3200), [0.025, 0.975])
    assert least <= asymptote + 0.2 * 32**-exponent <= most
    low, accuracy, high = expected_accuracy(curves.at(3200), 500, rng)

    assert low <= 1 - (asymptote + 0.2 * 32**-exponent) <= high
    assert low < accuracy < high < low + 0.1
    assert np.median(curves.at(800)) == pytest.approx(law[-1], abs=0.003)


def test_curve_falls_and_stays_within_bounds():
    """Noise that lets a larger share be worse gives a flat curve, and no error is below 0 or above 1."""
    rng = np.random.default_rng(1)
    curves = fit_curves(SIZES, draw_errors(wrong_answers([0.1, 0.2, 0.15, 0.3]), rng), rng)

    errors = np.array([curves.at(images) for images in (1, 10, 100, 800, 10_000, 10**9)])
    assert (np.diff(errors, axis=0) <= 0).all()
    assert (errors >= 0).all()
    assert (errors <= 1).all()
    assert np.median(errors[0]) < 0.6


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_few_answers_are_no_certainty(error):
    """Five images, all right or all wrong, leave most accuracies possible; a thousand do not."""
    rng = np.random.default_rng(1)
    few = expected_accuracy(draw_errors(wrong_answers([error], 5), rng)[:, 0], 1, rng)
    many = expected_accuracy(draw_errors(wrong_answers([error], 1000), rng)[:, 0], 1000, rng)

    assert few[2] - few[0] > 0.5
    assert many[2] - many[0] < 0.03
    assert 0 <= few[0] <= few[2] <= 1


def test_interval_has_the_chance_of_the_test_images():
    """The fewer images measure the accuracy, the wider the interval; the expected accuracy is the same."""
    errors = np.full(2000, 0.1)
    widths = []
    for num_tested in (10**9, 10_000, 100):
        low, accuracy, high = expected_accuracy(errors, num_tested, np.random.default_rng(1))
        assert accuracy == pytest.approx(0.9, abs=0.01)
        widths.append(high - low)
    assert widths[0] < widths[1] < widths[2]


def test_one_share_determines_no_exponent():
    """With a single share the exponents are those of the prior, and the draws are finite."""
    rng = np.random.default_rng(1)
    curves = fit_curves(SIZES[:1], draw_errors(wrong_answers([0.5], 5), rng), rng)

    assert 0 <= curves.exponent_D.min() < 0.05
    assert 0.95 < curves.exponent_D.max() <= 1
    assert np.isfinite(curves.at(200)).all()
