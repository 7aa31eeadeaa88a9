"""Scores of a split over all ranks, and the thresholds of false-alarm rates that follow from them."""

import math

import pytest
import torch

from tasks.collectives.reducer import Reducer
from tasks.metrics.calibration import Scores, ScoreSums
from tasks.model_package.description import RATES
from tasks.model_package.serving import unknown_scores
from tests.builders.finished_training import scores_of
from tests.fakes.thread_ranks import ThreadRanks, ThreadReducer

CPU = torch.device("cpu")


def noise(num_images: int, seed: int) -> torch.Tensor:
    """Return logits of seven classes."""
    return 4 * torch.randn(num_images, 7, generator=torch.Generator().manual_seed(seed))


def collected(logits_BK: torch.Tensor) -> Scores:
    """Return the scores of logits that are added in batches of 100."""
    sums = ScoreSums(CPU)
    for part in logits_BK.split(100):
        sums.add(part)
    return sums.reduce(Reducer())


def test_thresholds_leave_as_many_images_above_as_the_rate_allows() -> None:
    """Of 99 images, at a rate of 0.05, 4 may be above: with one more like them, 5 of 100 are the highest."""
    scores = scores_of(*(number / 100 for number in range(99)))
    thresholds = dict(zip(RATES, scores.thresholds() or (), strict=True))

    assert thresholds[0.05] == pytest.approx(0.94, abs=2e-6)
    assert scores.share_above(thresholds[0.05]) == pytest.approx(4 / 99)
    assert scores.share_above(thresholds[0.5]) == pytest.approx(49 / 99)
    assert (thresholds[0.01], scores.share_above(thresholds[0.01])) == (pytest.approx(0.98, abs=2e-6), 0)
    # A hundredth of 100 is the lowest rate that 99 images have a threshold for.
    assert [thresholds[rate] for rate in RATES if rate < 0.01] == 5 * [1.0]


def test_rate_of_false_alarms_holds_on_other_images() -> None:
    """Of 20,000 images about as many are above the thresholds of 4,000 others as the rate says."""
    fitted, others = collected(noise(4_000, 1)), unknown_scores(noise(20_000, 2))
    thresholds = fitted.thresholds()
    assert thresholds is not None

    for rate, threshold in zip(RATES, thresholds, strict=True):
        assert fitted.share_above(threshold) <= rate
        assert float((others > threshold).double().mean()) == pytest.approx(rate, abs=0.02)
    assert list(thresholds) == sorted(thresholds, reverse=True)


def test_image_at_the_threshold_is_not_above_it_after_rounding() -> None:
    """The same image in another batch may have a slightly higher score; thresholds are rounded up, but not above 1."""
    score = 0.123_456_2
    assert scores_of(score).thresholds() == (*(len(RATES) - 1) * [1.0], 0.123_457)
    assert scores_of(1 - 1e-9).thresholds() == len(RATES) * (1.0,)


def test_network_of_low_confidence_has_thresholds_below_1() -> None:
    """Its scores are all near 1, and still differ."""
    scores = collected(0.1 * noise(1000, 3))

    assert float(scores.ascending.min()) > 0.97
    assert len(set(scores.thresholds() or ())) == len(RATES)


def test_ranks_collect_what_a_process_collects() -> None:
    """Scores are those of all images to the last digit, also with a rank that has none."""
    parts = (noise(30, 4), noise(170, 5), torch.empty(0, 7))

    def collect(reducer: ThreadReducer) -> Scores:
        sums = ScoreSums(CPU)
        if len(parts[reducer.rank]):
            sums.add(parts[reducer.rank])
        return sums.reduce(reducer)

    expected = unknown_scores(torch.cat(parts)).sort().values
    assert [torch.equal(found.ascending, expected) for found in ThreadRanks(3).run(collect)] == 3 * [True]


def test_without_images_there_are_no_thresholds() -> None:
    """The split `val` may have no images, on any number of ranks."""
    for scores in (ScoreSums(CPU).reduce(Reducer()), *ThreadRanks(2).run(ScoreSums(CPU).reduce)):
        assert scores.thresholds() is None
        assert math.isnan(scores.share_above(0.5))
