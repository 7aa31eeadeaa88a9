"""Figures of challenger and champion from their predictions of the same images, and these figures as Markdown."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from tasks.registry.decision import ClassComparison, Comparison
from tasks.text.markup import markdown_table, markdown_text

NUM_CLASSES = 50
"""Maximum number of classes in the artifact."""


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
    gained, lost = Counter[str](), Counter[str]()
    for pair in pairs:
        gained[pair.label] += pair.count * (pair.challenger == pair.label != pair.champion)
        lost[pair.label] += pair.count * (pair.champion == pair.label != pair.challenger)
    only_challenger, only_champion = gained.total(), lost.total()
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
                label=label,
                images=count,
                champion=champion.recall(label),
                challenger=challenger.recall(label),
                only_challenger=gained[label],
                only_champion=lost[label],
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


def loss_p_value(lost: int, gained: int) -> float:
    """Return the one-sided p-value (0-1) of the exact sign test for a loss, given the images that two models differ on.

    It is the probability that of so many throws of a coin at least `lost` are heads. Source: Dixon and Mood, "The
    statistical sign test", Journal of the American Statistical Association 41 (1946), 557-566.

    Args:
        lost: Number of images that only the former model classifies correctly.
        gained: Number of images that only the new model classifies correctly.
    """
    return float(binomtest(lost, lost + gained, 0.5, "greater").pvalue) if lost + gained else 1.0


def chance_gain(differing: float, images: int, num_judged: int) -> float:
    """Return the gain of accuracy (0-1) that a challenger must exceed so that it is not the luckiest of several.

    A challenger that is as good as the champion wins each of the d images on which they differ with probability 1/2.
    By Hoeffding's inequality, its gain on n images exceeds sqrt(2 d ln k) / n with a probability of at most 1/k. So the
    k-th challenger of the same images has the level 1/k: Bonferroni's correction, where a first challenger needs any
    gain. Of K challengers that are not better, at most 1 + ln K are expected to win. This holds for challengers that
    were made without a look at the test images, as by training again on a schedule.

    Source: Hoeffding, "Probability inequalities for sums of bounded random variables", Journal of the American
    Statistical Association 58 (1963), 13-30, theorem 2; Dunn, "Multiple comparisons among means", ibid. 56 (1961),
    52-64. The repeated use of a test set is the subject of Blum and Hardt, "The Ladder", ICML 2015.

    Args:
        differing: Number d of images on which exactly one of the two is right, or more.
        images: Number n of images.
        num_judged: Number k of challengers that these images have judged, with this one.
    """
    return math.sqrt(2 * differing * math.log(num_judged)) / images


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


def comparison_markdown(found: Comparison) -> str:
    """Return the figures of both models on the same images, and their recall by class, as Markdown."""
    figures = [
        ["accuracy", accuracy_text(found.challenger_accuracy), accuracy_text(found.champion_accuracy)],
        ["macro F1", accuracy_text(found.challenger_macro_f1), accuracy_text(found.champion_macro_f1)],
        ["images that only this model classifies correctly", str(found.only_challenger), str(found.only_champion)],
    ]
    if found.challenger_milliseconds is not None and found.champion_milliseconds is not None:
        figures.append(
            ["ms for an image", f"{found.challenger_milliseconds:.1f}", f"{found.champion_milliseconds:.1f}"]
        )
    # The classes that lost most come first: they are what a reader looks for.
    by_change = sorted(found.classes, key=lambda one: one.challenger - one.champion)
    classes = [
        [markdown_text(one.label), str(one.images), accuracy_text(one.challenger), accuracy_text(one.champion)]
        for one in by_change[:NUM_CLASSES]
    ]
    judged = judged_text(found.num_judged)
    differing = found.only_challenger + found.only_champion
    omitted = len(by_change) - len(classes)
    of = "" if found.table_version is None else f" of version {found.table_version} of the table"
    return "\n".join(
        [
            "",
            f"### On the same {found.images} images{of}",
            "",
            markdown_table(["", "best run", "champion"], figures),
            "",
            f"McNemar's exact test: p = {found.p_value:.3g}. {judged[:1].upper()}{judged[1:]}: a gain of at "
            f"most {chance_gain(differing, found.images, found.num_judged):.4f} may be chance.",
            "",
            markdown_table(["class", "images", "recall, best run", "recall, champion"], classes),
            *(["", f"{omitted} more classes, which lost less, are not shown."] if omitted > 0 else []),
            "",
        ]
    )


def judged_text(number: int) -> str:
    """Return how many challengers the test images have judged, as a part of a sentence."""
    return f"these images have judged {number} challenger{'' if number == 1 else 's'} of this model"


def accuracy_text(value: float | None) -> str:
    """Return a fraction as text with four digits."""
    return "none" if value is None else f"{value:.4f}"
