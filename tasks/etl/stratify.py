"""The split `stratified`: apportionment of new images, so that the fractions hold in every class.

Each split of a class gets its exact share of the images, rounded down or up. Those are rounded up that have the
largest deficit over the whole table. So a thousand classes of three images have test images, too. The first image of a
class is in `train`: a class without one could not be predicted. A split that would have no image in the whole table
gets one of each class that can spare it: without images nothing is measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Self

from tasks.config.etl import EtlConfig
from tasks.refs import TEST, TRAIN, VAL

ORDER = (TEST, VAL, TRAIN)
"""Order in which splits get the images of a class, also in ties; evaluation needs images most, so `test` is first."""

Counts = dict[str, int]
"""Number of images by split, or by label."""

TABLE = ""
"""Label of all images of the table, which no class has."""


@dataclass(frozen=True)
class SplitRule:
    """Rule for the assignment of images to splits: the seed of their order, and the exact share of each split."""

    seed: int
    shares: Mapping[str, Fraction]

    @classmethod
    def of(cls, etl: EtlConfig) -> Self:
        """Return the rule for these settings; fractions are exact decimal numbers, not their binary approximations."""
        val, test = Fraction(str(etl.val_fraction)), Fraction(str(etl.test_fraction))
        return cls(etl.split_seed, {TEST: test, VAL: val, TRAIN: 1 - val - test})


def _deficits(existing: Counts, total: int, rule: SplitRule) -> dict[str, Fraction]:
    """Return the number of images that each split lacks to have its exact share of `total` images."""
    return {split: rule.shares[split] * total - existing.get(split, 0) for split in ORDER}


def apportion_classes(
    existing: Mapping[str, Counts], new: Mapping[str, int], rule: SplitRule
) -> Iterator[tuple[str, str, int, int]]:
    """Yield label, split, and first and last rank (excluded) of the split's new images, for every class.

    Args:
        existing: By label, the numbers of images that have a split already and keep it.
        new: By label, the number of images without a split.
        rule: The shares.
    """
    deficits = dict.fromkeys(ORDER, Fraction(0))  # over the whole table
    for counts in existing.values():
        own = _deficits(counts, sum(counts.values()), rule)
        deficits = {split: deficits[split] + own[split] for split in ORDER}
    shares: dict[str, Counts] = {}
    for label, num_new in sorted(new.items()):
        counts = existing.get(label, {})
        before = _deficits(counts, sum(counts.values()), rule)
        deficits = {split: deficits[split] - before[split] for split in ORDER}
        assigned = shares[label] = apportion_class(counts, num_new, rule, deficits)
        own = _deficits(counts, sum(counts.values()) + num_new, rule)
        deficits = {split: deficits[split] + own[split] - assigned[split] for split in ORDER}
    _fill_empty_splits(existing, shares, rule)
    for label, assigned in shares.items():
        first = 0
        for split in ORDER:
            if assigned[split]:
                yield label, split, first, first + assigned[split]
            first += assigned[split]


@dataclass(frozen=True)
class Group:
    """A group of images without a split.

    Attributes:
        number: Its number.
        draw: Its place in the order of groups of its size.
        sizes: Number of images by label.
    """

    number: int
    draw: int
    sizes: Counts


def deal_groups(
    existing: Mapping[str, Counts], new: Mapping[str, int], groups: Iterable[Group], rule: SplitRule
) -> dict[int, str]:
    """Return the split of each group by its number, so that the fractions hold as nearly as whole groups allow.

    Groups are dealt by size, the largest first. Each gets the split with the lowest quotient of images and share, in
    its classes and in the whole table. Half of the group is counted: it is the divisor method of Webster (Balinski and
    Young, Fair Representation, 1982). The first group of a class is in `train`.

    Args:
        existing: By label, the numbers of images that have a split already and keep it.
        new: By label, the number of images without a split, of groups or single; `apportion_classes` assigns the
            latter afterwards.
        groups: The groups.
        rule: The shares.
    """
    counts = {label: dict.fromkeys(ORDER, 0) | existing.get(label, {}) for label in {*existing, *new}}
    counts[TABLE] = {split: sum(of_class[split] for of_class in counts.values()) for split in ORDER}
    total = {label: sum(of_class.values()) + new.get(label, 0) for label, of_class in counts.items()}
    total[TABLE] += sum(new.values())
    shares = {split: float(rule.shares[split]) for split in ORDER if rule.shares[split]}
    dealt: dict[int, str] = {}
    # Sums of floats depend on the order of the labels.
    ordered = [
        (group.number, dict(sorted(group.sizes.items())) | {TABLE: sum(group.sizes.values())})
        for group in sorted(groups, key=lambda group: (-sum(group.sizes.values()), group.draw))
    ]
    for number, sizes in ordered:
        quotients = {
            split: sum(
                images * (counts[label][split] + images / 2) / (share * total[label]) for label, images in sizes.items()
            )
            for split, share in shares.items()
        }
        has_train = all(counts[label][TRAIN] for label in sizes)
        split = dealt[number] = min(quotients, key=quotients.__getitem__) if has_train else TRAIN
        for label, images in sizes.items():
            counts[label][split] += images
    spare = sum(max(0, total[label] - sum(counts[label].values()) - (not counts[label][TRAIN])) for label in new)
    empty = [split for split in shares if not counts[TABLE][split] and split != TRAIN]
    # Without images nothing is measured: each empty split gets the smallest groups that `train` can spare.
    for number, sizes in reversed(ordered) if spare < len(empty) else ():
        split = min(empty, key=counts[TABLE].__getitem__)
        fits = counts[TABLE][split] + sizes[TABLE] / 2 <= shares[split] * total[TABLE] or not counts[TABLE][split]
        if fits and dealt[number] == TRAIN and all(counts[label][TRAIN] > images for label, images in sizes.items()):
            dealt[number] = split
            for label, images in sizes.items():
                counts[label][split] += images
                counts[label][TRAIN] -= images
    return dealt


def _fill_empty_splits(existing: Mapping[str, Counts], assigned: Mapping[str, Counts], rule: SplitRule) -> None:
    """Give a split without images in the whole table one new image of each class that has another one in `train`.

    Args:
        existing: By label, the images that keep their split.
        assigned: By label, the new images of each split; changed.
        rule: The shares; a split with a share of 0 stays empty.
    """
    total = {split: sum(counts.get(split, 0) for counts in (*existing.values(), *assigned.values())) for split in ORDER}
    empty = [split for split in ORDER if rule.shares[split] and not total[split]]
    if not empty:
        return

    def move(counts: Counts, giver: str, split: str) -> None:
        for moved, number in ((giver, -1), (split, 1)):
            counts[moved] += number
            total[moved] += number

    for label, counts in assigned.items():
        spare = counts[TRAIN] - (not existing.get(label, {}).get(TRAIN))
        for split in sorted(empty, key=total.__getitem__)[: max(0, spare)]:
            move(counts, TRAIN, split)
    # Only where fractions near a half left `train` one image of each class.
    for split in empty:
        giver = VAL if split == TEST else TEST
        givers = [counts for counts in assigned.values() if counts[giver]] if total[giver] > 1 else []
        if givers and not total[split]:
            move(givers[0], giver, split)


def apportion_class(existing: Counts, num_new: int, rule: SplitRule, deficits: Mapping[str, Fraction]) -> Counts:
    """Return the number of a class's new images that each split gets.

    If each split had its exact share of the class, rounded down or up, it has so afterwards. A split may have more
    than its share after deletions: then the others get the new images, first those with the largest deficit. Before
    that, a class without an image in `train` gets one there.

    Args:
        existing: The class's images in each split.
        num_new: Number of images to assign.
        rule: The shares.
        deficits: The deficit of each split over all other classes.
    """
    if num_new and not existing.get(TRAIN):
        assigned = apportion_class({**existing, TRAIN: 1}, num_new - 1, rule, deficits)
        return assigned | {TRAIN: assigned[TRAIN] + 1}
    due = _deficits(existing, sum(existing.values()) + num_new, rule)
    if sum(max(0, floor(images)) for images in due.values()) > num_new:
        due, deficits = _due_below_share(existing, num_new, rule), dict.fromkeys(ORDER, Fraction(0))
    assigned = {split: max(0, floor(due[split])) for split in ORDER}
    # At most one more image each, and only if the share is not an integer: it is rounded up.
    short = [split for split in ORDER if assigned[split] < due[split]]
    for split in sorted(short, key=lambda split: assigned[split] - due[split] - deficits[split])[
        : num_new - sum(assigned.values())
    ]:
        assigned[split] += 1
    return assigned


def _due_below_share(existing: Counts, num_new: int, rule: SplitRule) -> dict[str, Fraction]:
    """Return the images due to each split if one has more than its share: the others are filled to the same level."""
    filling = [split for split in ORDER if rule.shares[split]]
    while True:
        has = num_new + sum(existing.get(split, 0) for split in filling)
        level = has / sum((rule.shares[split] for split in filling), Fraction(0))
        below = [split for split in filling if existing.get(split, 0) <= level * rule.shares[split]]
        if below == filling:
            due = {split: level * rule.shares[split] - existing.get(split, 0) for split in filling}
            return dict.fromkeys(ORDER, Fraction(0)) | due
        filling = below
