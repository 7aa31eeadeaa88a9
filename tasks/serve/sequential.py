"""The sequential test of a live comparison: its p-value holds at every look, however often and long it is looked at."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from scipy.special import betainc, betaln

Verdict = Literal["better", "worse", "undecided"]


class Tally(NamedTuple):
    """The test after some labels.

    Attributes:
        num_better: Images on which only the challenger is right.
        num_worse: Images on which only the champion is right.
        num_labels: Labels that were looked at, those on which neither is right included.
        p_value: Always-valid p-value of the hypothesis that the challenger is not better.
        verdict: Whether the challenger is better, or worse, at the level of the test.
    """

    num_better: int = 0
    num_worse: int = 0
    num_labels: int = 0
    p_value: float = 1.0
    verdict: Verdict = "undecided"


def log_evidence(num_better: int, num_worse: int) -> float:
    """Return the logarithm of the evidence against "the challenger is right on at most half of the images that differ".

    It is the likelihood of the outcomes, averaged over all shares p from 1/2 to 1, over their likelihood at 1/2:
    2^(n+1) times the integral of p^b (1-p)^w from 1/2 to 1. If the hypothesis holds, this is a nonnegative
    supermartingale that begins with 1. So it ever reaches 1/alpha with a probability of at most alpha (Ville 1939).
    See Robbins, "Statistical Methods Related to the Law of the Iterated Logarithm", Annals of Mathematical Statistics
    1970, and Johari, Koomen, Pekelis and Walsh, "Always Valid Inference", Operations Research 70(3), 2022.
    """
    # The upper half of the incomplete beta function, which is the lower half with its arguments exchanged.
    share = float(betainc(num_worse + 1, num_better + 1, 0.5))
    if share == 0.0:
        return -math.inf
    return (num_better + num_worse + 1) * math.log(2) + float(betaln(num_better + 1, num_worse + 1)) + math.log(share)


def follow(outcomes: Iterable[int], alpha: float) -> Tally:
    """Return the test after some labels, in their order; it ends with the first verdict.

    Args:
        outcomes: 1 if only the challenger is right, -1 if only the champion is, 0 if neither is.
        alpha: Level: the probability that a challenger is found to be better that is not, and likewise for a champion.
    """
    state = Tally()
    for outcome in outcomes:
        better, worse = state.num_better + (outcome > 0), state.num_worse + (outcome < 0)
        # The smallest p-value so far holds: the evidence was reached, whatever came after it.
        p_value = min(state.p_value, math.exp(min(0.0, -log_evidence(better, worse))))
        verdict: Verdict = "undecided"
        if p_value <= alpha:
            verdict = "better"
        elif log_evidence(worse, better) >= -math.log(alpha):
            verdict = "worse"
        state = Tally(better, worse, state.num_labels + 1, p_value, verdict)
        if verdict != "undecided":
            break
    return state
