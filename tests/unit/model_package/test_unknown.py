"""The score of images of no class, compared with values calculated by hand, and the thresholds of rates."""

import pytest
import torch

from tasks.model_package.description import RATES, check_unknown, threshold_at
from tasks.model_package.serving import GAMMA, MAX_CLASSES, unknown_scores


def logits_of(*probabilities: float) -> torch.Tensor:
    """Return logits, float32 (1, K), of these probabilities."""
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def test_score_is_the_generalized_entropy_as_a_fraction_of_its_maximum() -> None:
    """Each class adds (p (1 - p)) ** gamma; the sum of equal probabilities is the largest."""
    found = float(unknown_scores(logits_of(0.7, 0.2, 0.1)))

    wanted = (0.21**GAMMA + 0.16**GAMMA + 0.09**GAMMA) / (3 * (2 / 9) ** GAMMA)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert float(unknown_scores(torch.zeros(1, 3))) == pytest.approx(1)
    assert float(unknown_scores(torch.tensor([[300.0, 0.0, 0.0]]))) < 1e-6


@pytest.mark.parametrize("num_classes", [2, 3, 7, 99, 100, 101, 1000])
def test_score_is_between_0_and_1(num_classes: int) -> None:
    """It is at most 1 in spite of rounding, as no score exceeds the threshold 1."""
    logits_BK = (
        torch.randn(200, num_classes, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 3, 200)[:, None]
    )
    scores_B = unknown_scores(logits_BK)

    assert scores_B.dtype == torch.float64
    assert bool(((scores_B >= 0) & (scores_B <= 1)).all())
    assert float(unknown_scores(torch.full((1, num_classes), 0.1))) <= 1


def test_score_ignores_a_shift_of_the_logits_and_improbable_classes() -> None:
    """Probabilities do not depend on a shift; only the MAX_CLASSES most probable classes count."""
    logits_BK = torch.randn(50, 300, generator=torch.Generator().manual_seed(2)).double()
    # Of the improbable classes, one gets the probability of all of them but a little.
    least_BN = logits_BK.argsort(dim=1)[:, : 300 - MAX_CLASSES]
    probabilities_BN = logits_BK.gather(1, least_BN).exp()
    low_B = probabilities_BN.amin(dim=1, keepdim=True)
    moved_BN = low_B.expand_as(probabilities_BN).clone()
    moved_BN[:, 100:] += (probabilities_BN - low_B).sum(dim=1, keepdim=True) / 100
    others_BK = logits_BK.scatter(1, least_BN, moved_BN.log())

    assert unknown_scores(logits_BK + 5).tolist() == pytest.approx(unknown_scores(logits_BK).tolist(), abs=1e-6)
    assert bool((moved_BN.amax(dim=1) < logits_BK.topk(MAX_CLASSES).values[:, -1].exp()).all())
    assert unknown_scores(others_BK).tolist() == pytest.approx(unknown_scores(logits_BK).tolist(), abs=1e-9)


def test_score_of_two_classes_orders_images_as_their_largest_probability() -> None:
    """With two classes there is nothing else to tell from."""
    probable = torch.linspace(0.5, 0.999, 20).tolist()
    scores = [float(unknown_scores(logits_of(one, 1 - one))) for one in probable]

    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)


def test_threshold_is_that_of_the_next_lower_rate() -> None:
    """Between two rates there are not more false alarms than asked for; without a rate none is above the threshold."""
    thresholds = tuple(1 - rate for rate in RATES)

    assert [threshold_at(rate, thresholds) for rate in (0.05, 0.06, 0.5)] == [0.95, 0.95, 0.5]
    assert [threshold_at(0.0, given) for given in (thresholds, None)] == [1.0, 1.0]


def test_checks_need_a_rate() -> None:
    """Without a rate any class may be called `unknown`, and a model needs no thresholds."""
    check_unknown(0.0, ("unknown", "known"), None)
    check_unknown(0.05, ("cat", "dog"))
    with pytest.raises(ValueError, match="but 'unknown' is a class"):
        check_unknown(0.05, ("unknown", "known"))
