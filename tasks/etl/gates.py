"""Quality gates on the files of a source, checked before a table changes: pure functions of counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Self

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput, join_names
from tasks.etl.stratify import SplitRule
from tasks.interval import wilson_interval
from tasks.refs import SPLITS, TEST, TRAIN, VAL
from tasks.schema import IGNORED, QUARANTINED, STORED

NUM_NAMED = 5
"""Maximum number of classes that a message names."""

NUM_LISTED = 20
"""Maximum number of near-duplicates and of quarantined files that are listed; all of them are counted."""

DELETED_FLOOR = 5
"""Number of images that may leave a table, or a class, in one run, whatever their fraction."""

MIN_TEST_IMAGES = 30
"""With fewer test images, the 95 % interval of an accuracy of 0.9 is wider than 0.2."""


@dataclass
class FileCounts:
    """Numbers of files of the source and of images in the table.

    Attributes:
        outcomes: Number of files by outcome.
        reasons: Number of files that cannot be used by reason; unreadable ones that keep their image are among them.
        images: Images that the table `images` will have, by label; 0 for a label whose files are all unusable.
        classes: The same by label and split, without zeros.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    classes: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of_groups(
        cls, groups: Iterable[tuple[str | None, str | None, str, str | None, int]], kept: Iterable[tuple[str, str, int]]
    ) -> Self:
        """Return the sums over groups of files and over the images kept of deleted files.

        Args:
            groups: Label, split, outcome, reason and number of files of each group.
            kept: Label, split and number of images of each group.
        """
        counts = cls()
        stored = list(kept)
        for label, split, outcome, reason, number in groups:
            counts.outcomes[outcome] += number
            if outcome == QUARANTINED:
                counts.reasons[reason or ""] += number
            if label is not None:
                counts.images[label] += 0
            if outcome == STORED:
                assert label is not None
                assert split is not None
                stored.append((label, split, number))
        for label, split, number in sorted(stored):
            counts.images[label] += number
            by_split = counts.classes.setdefault(label, {})
            by_split[split] = by_split.get(split, 0) + number
        return counts


@dataclass(frozen=True)
class GroupReport:
    """The groups of a run.

    Attributes:
        num_groups: Number of groups.
        num_images: Number of images in them.
        num_others: Number of images without a group.
        largest: Number of images of the largest group by label.
        labels: Number of groups with several labels, and name and sizes of the first.
        splits: The same of groups that had several splits before the run; their images keep them.
        complete: Whether all near-duplicates were found.
    """

    num_groups: int
    num_images: int
    num_others: int
    largest: dict[str, int]
    labels: tuple[int, str]
    splits: tuple[int, str]
    complete: bool


def check_bad_fraction(counts: FileCounts, etl: EtlConfig) -> None:
    """Check that the source does not have too many unusable files.

    Raises:
        WrongInput: More than `max_bad_fraction` of the files are quarantined.
    """
    bad, total = counts.reasons.total(), counts.outcomes.total() - counts.outcomes[IGNORED]
    if bad > etl.max_bad_fraction * total:
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.reasons.items()))
        raise WrongInput(
            f"{bad} of {total} files cannot be used ({reasons}), more than etl.max_bad_fraction {etl.max_bad_fraction}",
            setting="etl.max_bad_fraction",
            way_out="fix the source or raise the fraction; the tables are unchanged",
        )


def check_class_sizes(counts: FileCounts, etl: EtlConfig) -> None:
    """Check that no class has too few images to train and evaluate on.

    Raises:
        WrongInput: A class has fewer than `min_images_per_class` images, over all splits.
    """
    small = sorted((number, label) for label, number in counts.images.items() if number < etl.min_images_per_class)
    if small:
        named = join_names([f"'{label}' {number}" for number, label in small[:NUM_NAMED]], len(small))
        raise WrongInput(
            f"{len(small)} of {len(counts.images)} classes have fewer usable images than etl.min_images_per_class "
            f"{etl.min_images_per_class} ({named})",
            setting="etl.min_images_per_class",
            way_out="add images, remove the classes from the source, or lower the bound; the tables are unchanged",
        )


def check_groups_fit(found: GroupReport, counts: FileCounts, etl: EtlConfig) -> None:
    """Check that no split is empty since groups are larger than it.

    Raises:
        WrongInput: A split with a fraction above 0 has no image in any class.
    """
    for split, fraction in ((VAL, etl.val_fraction), (TEST, etl.test_fraction)):
        if fraction and not any(by_split.get(split) for by_split in counts.classes.values()):
            raise WrongInput(
                f"etl.split_group.by is '{etl.split_group.by}', and {found.num_groups} groups of at most "
                f"{max(found.largest.values(), default=1)} images of a class leave none of {counts.images.total()} "
                f"images for the split '{split}'",
                setting="etl.split_group.by",
                way_out="add images of other groups, or use smaller groups; the tables are unchanged",
            )


def group_warnings(found: GroupReport, counts: FileCounts, etl: EtlConfig) -> list[str]:
    """Return warnings about groups with several labels or splits, or larger than a split of their class."""
    warnings = []
    for number, example in [found.labels] if found.labels[0] else []:
        warnings.append(f"{number} groups of etl.split_group have images of several labels, e.g. {example}")
    for number, example in [found.splits] if found.splits[0] else []:
        warnings.append(
            f"{number} groups of etl.split_group have images in several splits, e.g. {example}: no image changes its "
            "split, and new ones join most of their group"
        )
    large = {
        label: sum(by_split.values())
        for label, by_split in counts.classes.items()
        for split, fraction in ((VAL, etl.val_fraction), (TEST, etl.test_fraction))
        if found.largest.get(label, 0) > 1 and not by_split.get(split) and fraction * sum(by_split.values()) >= 1
    }
    if large:
        named = [f"'{label}' {size}, largest group {found.largest[label]}" for label, size in sorted(large.items())]
        warnings.append(
            f"{len(large)} classes have no images in '{VAL}' or '{TEST}', since they are few or large groups "
            f"({join_names(named[:NUM_NAMED], len(named))}): add images of other groups"
        )
    if not found.complete:
        warnings.append(
            "very many images are nearly plain: not all near-duplicates were found, and groups may be split"
        )
    return warnings


def check_enough_images(sizes: Counter[str], source: str, etl: EtlConfig, things: str = "images") -> None:
    """Check that no split that is made by fractions would be empty, before files are ingested.

    Args:
        sizes: Number of files, or of groups of files, of each class.
        source: Folder or URL, for the error message.
        etl: Settings of the splits.
        things: What `sizes` counts, for the error message.

    Raises:
        WrongInput: A split has the fraction 0, or a class would have no image to train on, or a split none at all.
    """
    for split, fraction in ((VAL, etl.val_fraction), (TEST, etl.test_fraction)):
        if not fraction:
            raise WrongInput(
                f"etl.{split}_fraction is 0, so that the split '{split}' has no images",
                setting=f"etl.{split}_fraction",
                way_out="training needs some: give a larger fraction, such as 0.1",
            )
    needed = len(sizes) + len((VAL, TEST))
    if (missing := needed - sizes.total()) > 0:
        raise WrongInput(
            f"source is '{source}', which has {sizes.total()} {things} in {len(sizes)} classes; training needs "
            f"{needed}: one of each class in the split '{TRAIN}', and one more in each of '{VAL}' and '{TEST}'",
            setting="source",
            way_out=f"add {missing} {things if missing > 1 else things[:-1]}",
        )


def most_to_train_on(sizes: Counter[str], etl: EtlConfig, *, is_new: bool) -> int:
    """Return the most images that the split `train` can have, from the number of files of each class.

    In a new table the fractions hold to one image in every class; an older one may have lost images of other splits.
    """
    most = sizes.total() - len((VAL, TEST))
    if not is_new or etl.split_by != "stratified" or etl.split_group.by != "none":
        return most
    share = SplitRule.of(etl).shares[TRAIN]
    return min(most, sum(ceil(number * share) for number in sizes.values()))


def is_beyond(deleted: int, total: int, max_fraction: float) -> bool:
    """Return whether so many deletions of a total are a question, and not a change of the source."""
    return deleted > DELETED_FLOOR and deleted > max_fraction * total


def too_many_deleted(lost: str, setting: str, unchanged: str) -> WrongInput:
    """Return the error of deletions beyond the bound.

    Args:
        lost: The table, and what it would lose, with numbers, and the bound if it is exceeded.
        setting: Name of the setting of the bound.
        unchanged: The end of the message.
    """
    return WrongInput(
        lost,
        setting=setting,
        way_out="check that all of the source is there, such as a mounted class folder; if these images are to leave, "
        f"set {setting} to 1 for one run; {unchanged}",
    )


def check_deletions(deleted: Counter[str], before: Counter[str], after: Counter[str], etl: EtlConfig) -> None:
    """Check that a run does not remove too many images, as it would with a source of which a part is missing.

    Args:
        deleted: Number of images that would leave the table, by their class.
        before: Number of images in the table, by class.
        after: Number of images that the table will have, by class.
        etl: Settings with the bound.

    Raises:
        WrongInput: More than `max_deleted_fraction` of all images or of a class would leave, and more than
            DELETED_FLOOR of them; or a class would lose its last image.
    """
    bound = etl.max_deleted_fraction
    if bound >= 1 or not deleted:
        return
    is_much = is_beyond(deleted.total(), before.total(), bound)
    beyond = [label for label, number in deleted.items() if is_beyond(number, before[label], bound)]
    emptied = [label for label in deleted if not after[label]]
    if not (is_much or beyond or emptied):
        return
    named = sorted({*beyond, *emptied} or deleted, key=lambda label: (-deleted[label], label))
    shown = join_names([f"'{label}' {deleted[label]} of {before[label]}" for label in named[:NUM_NAMED]], len(named))
    lost = f"the table 'images' would lose {deleted.total()} of {before.total()} images, "
    if is_much or beyond:
        lost += f"{shown}, more than etl.max_deleted_fraction {bound} allows"
    else:
        lost += f"among them the last of a class ({shown})"
    raise too_many_deleted(lost, "etl.max_deleted_fraction", "the tables are unchanged")


def small_split_warnings(counts: FileCounts, etl: EtlConfig) -> list[str]:
    """Return warnings about splits and classes that have too few images for precise metrics.

    They concern a split `test` with fewer than MIN_TEST_IMAGES images, and classes with fewer than
    `min_images_per_class` images for each of the three splits.
    """
    warnings = []
    test = {label: counts.classes.get(label, {}).get(TEST, 0) for label in counts.images}
    if sum(test.values()) < MIN_TEST_IMAGES:
        warnings.append(
            f"the split 'test' has {sum(test.values())} images in all: {_interval(sum(test.values()), 'an accuracy')}; "
            "add images, or raise etl.test_fraction for new tables"
        )
    bound = etl.min_images_per_class * len(SPLITS)
    small = sorted((number, label) for label, number in counts.images.items() if number < bound)
    if small:
        named = join_names([f"'{label}' {number}" for number, label in small[:NUM_NAMED]], len(small))
        fewest = min(test[label] for _, label in small)
        warnings.append(
            f"{len(small)} of {len(counts.images)} classes have fewer images than etl.min_images_per_class "
            f"{etl.min_images_per_class} for each of the {len(SPLITS)} splits ({named}), and one of them has {fewest} "
            f"test images: {_interval(fewest, 'a recall')}"
        )
    return warnings


def _interval(num_images: int, metric: str) -> str:
    """Describe the confidence interval of a metric of 0.9 on so many images."""
    if not num_images:
        return "nothing can be measured on them"
    low, high = wilson_interval(0.9 * num_images, num_images)
    return (
        f"the 95 % interval (Wilson) of {metric} of 0.90 measured on them goes from {low:.2f} to {high:.2f} "
        f"and is {high - low:.2f} wide"
    )
