"""Figures of challenger and champion from their predictions of the same images."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from tasks.registry.decision import ClassComparison, Comparison


@dataclass(frozen=True)
class PredictedPair:
    """Number of images with one label, and with the same labels predicted by challenger and champion."""

    label: str
    challenger: str | None
    """The challenger's most probable class; None for an image that cannot be decoded."""
    champion: str | None
    count: int


def compare(pairs: Sequence[PredictedPair], left_out: int = 0) -> Comparison:
    """Compute the figures from pairs of predictions; classes are compared by name.

    Args:
        pairs: All combinations of labels, with the number of their images.
        left_out: Number of images that do not count.

    Raises:
        ValueError: `pairs` is empty.
    """
    images = sum(pair.count for pair in pairs)
    if not images:
        raise ValueError("no images are left to compare two models on")
    only_challenger = sum(p.count for p in pairs if p.challenger == p.label != p.champion)
    only_champion = sum(p.count for p in pairs if p.champion == p.label != p.challenger)
    challenger = _Predicted((p.label, p.challenger, p.count) for p in pairs)
    champion = _Predicted((p.label, p.champion, p.count) for p in pairs)
    return Comparison(
        images=images,
        left_out=left_out,
        challenger_accuracy=challenger.accuracy,
        champion_accuracy=champion.accuracy,
        challenger_macro_f1=challenger.macro_f1,
        champion_macro_f1=champion.macro_f1,
        only_challenger=only_challenger,
        only_champion=only_champion,
        p_value=mcnemar_p_value(only_challenger, only_champion),
        classes=tuple(
            ClassComparison(
                label=label, images=count, champion=champion.recall(label), challenger=challenger.recall(label)
            )
            for label, count in sorted(challenger.images.items())
        ),
    )


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value (0-1) of McNemar's exact test, a binomial test of the discordant pairs.

    Source: McNemar, Psychometrika 12 (1947), 153-157; the exact form is the sign test of the pairs that differ.

    Args:
        only_first: Number of images that only the first model classifies correctly.
        only_second: The same of the second model.
    """
    differing = only_first + only_second
    return float(binomtest(only_first, differing, 0.5).pvalue) if differing else 1.0


class _Predicted:
    """Counts of a model's predictions by class."""

    def __init__(self, rows: Iterable[tuple[str, str | None, int]]) -> None:
        self.images: Counter[str] = Counter()
        self._predicted: Counter[str | None] = Counter()
        self._right: Counter[str] = Counter()
        for label, predicted, count in rows:
            self.images[label] += count
            self._predicted[predicted] += count
            if predicted == label:
                self._right[label] += count

    @property
    def accuracy(self) -> float:
        return self._right.total() / self.images.total()

    @property
    def macro_f1(self) -> float:
        scores = [2 * self._right[label] / (images + self._predicted[label]) for label, images in self.images.items()]
        return sum(scores) / len(scores)

    def recall(self, label: str) -> float:
        return self._right[label] / self.images[label]
