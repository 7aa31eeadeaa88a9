"""The sequential test of a live comparison: its formula, its errors over many replays, and the labels that it saves."""

import math
from statistics import median

import numpy as np
import pytest
from scipy.integrate import quad
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from tasks.serve.sequential import Tally, follow, log_evidence

REPLAYS = 1000


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 1), (0, 7), (12, 12), (40, 22)])
def test_evidence_is_the_mean_likelihood_ratio(better: int, worse: int) -> None:
    """As integrated numerically."""
    mean, _error = quad(lambda p: 2 * p**better * (1 - p) ** worse, 0.5, 1.0)

    assert log_evidence(better, worse) == pytest.approx(math.log(mean) + (better + worse) * math.log(2), rel=1e-9)


def test_evidence_is_a_martingale_between_equal_models() -> None:
    """Its mean after another label is what it is now: it reaches 1/alpha with a probability of alpha at most."""
    for better in range(30):
        for worse in range(30):
            after = [math.exp(log_evidence(*counts)) for counts in ((better + 1, worse), (better, worse + 1))]
            assert sum(after) / 2 == pytest.approx(math.exp(log_evidence(better, worse)), rel=1e-9)


def test_evidence_for_the_champion_alone_is_none_for_the_challenger() -> None:
    """Its logarithm falls without an overflow."""
    assert log_evidence(0, 5000) < -3000
    assert follow([-1] * 50, 0.05).p_value == 1.0


def replay(share: float, num_labels: int, alpha: float = 0.05) -> list[Tally]:
    """Return the test of many sequences in which the challenger is right with this probability."""
    generator = np.random.default_rng(7)
    return [follow(np.where(generator.random(num_labels) < share, 1, -1).tolist(), alpha) for _number in range(REPLAYS)]


def test_equal_models_are_rarely_told_apart() -> None:
    """At most alpha of the replays, however long they are looked at: here at each of 300 labels."""
    found = replay(0.5, 300)

    assert sum(one.verdict == "better" for one in found) <= 0.05 * REPLAYS
    assert sum(one.verdict == "worse" for one in found) <= 0.05 * REPLAYS


def test_a_worse_challenger_is_never_better_more_often_than_alpha() -> None:
    """And is found to be worse."""
    found = replay(0.35, 400)

    assert sum(one.verdict == "better" for one in found) <= 0.01 * REPLAYS
    assert sum(one.verdict == "worse" for one in found) >= 0.99 * REPLAYS


def test_a_better_challenger_is_found_soon() -> None:
    """With about as many labels as a test of a fixed size would need that knew the share before."""
    found = replay(0.7, 400)

    assert sum(one.verdict == "better" for one in found) >= 0.99 * REPLAYS
    # A one-sided binomial test with power 0.9 needs 50 (Fleiss 1981, equation 1.5, with p = 0.7 and 0.5).
    assert median(one.num_labels for one in found) < 60


def test_the_first_verdict_stays() -> None:
    """Later labels are not looked at."""
    won = follow([1] * 20 + [-1] * 500, 0.05)

    assert won.verdict == "better"
    assert won.num_worse == 0
    assert won.num_labels < 10
    assert won.p_value <= 0.05


def test_images_on_which_neither_is_right_count_as_labels_alone() -> None:
    """They say nothing about which one is better."""
    assert follow([0] * 40, 0.05) == Tally(num_labels=40)


def test_labels_where_two_models_differ_save_most_of_the_others() -> None:
    """Recorded predictions of two models of the digits, in 200 orders: at least five times fewer labels."""
    pixels, digits = load_digits(return_X_y=True)
    pixels = pixels / 16
    few, many = slice(0, 120), slice(0, 600)
    champion, challenger = (
        LogisticRegression(max_iter=300).fit(pixels[part], digits[part]).predict(pixels[600:]) for part in (few, many)
    )
    right = digits[600:]
    outcome = (challenger == right).astype(int) - (champion == right).astype(int)
    differs = champion != challenger
    generator = np.random.default_rng(1)
    orders = [generator.permutation(len(right)) for _number in range(200)]

    asked = [follow(outcome[order][differs[order]].tolist(), 0.05) for order in orders]
    at_random = [follow(outcome[order].tolist(), 0.05) for order in orders]

    assert {one.verdict for one in asked} == {"better"}
    assert {one.verdict for one in at_random} == {"better"}
    labels = [median(one.num_labels for one in found) for found in (asked, at_random)]
    assert 5 * labels[0] <= labels[1], labels


def test_the_worse_of_two_recorded_models_never_becomes_the_better() -> None:
    """In none of the orders of the same predictions."""
    pixels, digits = load_digits(return_X_y=True)
    pixels = pixels / 16
    better, worse = (
        LogisticRegression(max_iter=300).fit(pixels[:num], digits[:num]).predict(pixels[600:]) for num in (600, 120)
    )
    right = digits[600:]
    outcome = (worse == right).astype(int) - (better == right).astype(int)
    generator = np.random.default_rng(2)

    found = [follow(outcome[generator.permutation(len(right))].tolist(), 0.05).verdict for _number in range(200)]

    assert "better" not in found
