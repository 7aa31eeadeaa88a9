"""The split `stratified`: how many of a class's new images each split gets, so that the fractions hold in every class.

The splits of a class are an apportionment: each gets its exact share, rounded down or up, and which of them are
rounded up is what the table as a whole owes its splits. So a thousand classes of three images have test images, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Self

from tasks.config.etl import EtlConfig
from tasks.schema import TEST, TRAIN, VAL

ORDER = (TEST, VAL, TRAIN)
"""In which order splits take the images of a class, and which of equals is first: a measurement needs images most."""

Counts = dict[str, int]
"""Number of images by split."""


@dataclass(frozen=True)
class SplitRule:
    """How images are dealt: the seed of their order, and the exact share of each split."""

    seed: int
    shares: Mapping[str, Fraction]

    @classmethod
    def of(cls, etl: EtlConfig) -> Self:
        """Return the rule of these settings; a fraction is the decimal number that was written."""
        val, test = Fraction(str(etl.val_fraction)), Fraction(str(etl.test_fraction))
        return cls(etl.split_seed, {TEST: test, VAL: val, TRAIN: 1 - val - test})


def _owed(held: Counts, total: int, rule: SplitRule) -> dict[str, Fraction]:
    return {split: rule.shares[split] * total - held.get(split, 0) for split in ORDER}


def deal_classes(
    held: Mapping[str, Counts], new: Mapping[str, int], rule: SplitRule
) -> Iterator[tuple[str, str, int, int]]:
    """Share out the new images of every class: yield label, split, and the ranks of its images, the last excluded.

    Args:
        held: By label, the images that have a split already; none of them moves.
        new: By label, how many images have none yet.
        rule: The shares.
    """
    owed = dict.fromkeys(ORDER, Fraction(0))  # by the table as a whole
    for counts in held.values():
        own = _owed(counts, sum(counts.values()), rule)
        owed = {split: owed[split] + own[split] for split in ORDER}
    for label, num_new in sorted(new.items()):
        counts = held.get(label, {})
        before = _owed(counts, sum(counts.values()), rule)
        owed = {split: owed[split] - before[split] for split in ORDER}
        dealt = deal_class(counts, num_new, rule, owed)
        own = _owed(counts, sum(counts.values()) + num_new, rule)
        owed = {split: owed[split] + own[split] - dealt[split] for split in ORDER}
        first = 0
        for split in ORDER:
            if dealt[split]:
                yield label, split, first, first + dealt[split]
            first += dealt[split]


def deal_class(held: Counts, num_new: int, rule: SplitRule, owed: Mapping[str, Fraction]) -> Counts:
    """Return how many of a class's new images each split gets.

    Afterwards each split has its exact share of the class, rounded down or up, if that was so before. Where images
    were deleted and a split has more than its share, the others get the new ones, those that lack most of theirs first.

    Args:
        held: The class's images in each split.
        num_new: How many images are to be dealt.
        rule: The shares.
        owed: What all other classes together owe each split.
    """
    due = _owed(held, sum(held.values()) + num_new, rule)
    if sum(max(0, floor(images)) for images in due.values()) > num_new:
        due, owed = _due_without_the_full(held, num_new, rule), dict.fromkeys(ORDER, Fraction(0))
    dealt = {split: max(0, floor(due[split])) for split in ORDER}
    # At most one more each, and only where the share is not a whole number: it is rounded up.
    short = [split for split in ORDER if dealt[split] < due[split]]
    for split in sorted(short, key=lambda split: dealt[split] - due[split] - owed[split])[
        : num_new - sum(dealt.values())
    ]:
        dealt[split] += 1
    return dealt


def _due_without_the_full(held: Counts, num_new: int, rule: SplitRule) -> dict[str, Fraction]:
    """Return what is due to each split where one has more than its share: the others get the same part of theirs."""
    filling = [split for split in ORDER if rule.shares[split]]
    while True:
        has = num_new + sum(held.get(split, 0) for split in filling)
        level = has / sum((rule.shares[split] for split in filling), Fraction(0))
        below = [split for split in filling if held.get(split, 0) <= level * rule.shares[split]]
        if below == filling:
            due = {split: level * rule.shares[split] - held.get(split, 0) for split in filling}
            return dict.fromkeys(ORDER, Fraction(0)) | due
        filling = below
