"""Apportionment of each class's images to splits, over random histories of a table."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config.etl import EtlConfig
from tasks.etl.stratify import ORDER, Counts, SplitRule, apportion_classes
from tasks.refs import TEST, TRAIN, VAL

LABELS = [f"class-{number}" for number in range(5)]

TENTHS = SplitRule.of(EtlConfig())

rules = st.tuples(st.integers(0, 49), st.integers(0, 50)).map(
    lambda shares: SplitRule.of(EtlConfig(val_fraction=shares[0] / 100, test_fraction=shares[1] / 100))
)
increments = st.lists(st.dictionaries(st.sampled_from(LABELS), st.integers(1, 40), max_size=5), max_size=8)


def assign(existing: dict[str, Counts], new: dict[str, int], rule: SplitRule) -> dict[str, Counts]:
    """Assign new images; return the new counts, and check that every rank is assigned to exactly one split."""
    after = {label: dict(counts) for label, counts in existing.items()}
    ranks: dict[str, list[int]] = {}
    for label, split, first, last in apportion_classes(existing, new, rule):
        ranks.setdefault(label, []).extend(range(first, last))
        counts = after.setdefault(label, {})
        counts[split] = counts.get(split, 0) + last - first
    assert ranks == {label: list(range(number)) for label, number in new.items()}
    return after


def check_shares(existing: dict[str, Counts], rule: SplitRule) -> None:
    """Assert that each split of each class has its exact share, rounded down or up."""
    for counts in existing.values():
        for split in ORDER:
            # A class gives `val` and `test` an image each where they would have none in the whole table.
            most = 2 if split == TRAIN else 1
            assert abs(counts.get(split, 0) - rule.shares[split] * sum(counts.values())) < most


@given(increments, rules)
def test_fractions_hold_to_one_image_in_every_class_after_every_increment(steps, rule) -> None:
    """Each split of each class has its share, rounded down or up, after any sequence of new images."""
    existing: dict[str, Counts] = {}
    for new in steps:
        existing = assign(existing, new, rule)
        check_shares(existing, rule)


@given(increments, rules.filter(lambda rule: rule.shares[TRAIN] >= Fraction(1, 2)))
def test_fractions_hold_over_the_whole_table(steps, rule) -> None:
    """Rounding errors of classes cancel out over the table, also with classes smaller than a split's share."""
    existing: dict[str, Counts] = {}
    for new in steps:
        existing = assign(existing, new, rule)
    total: Counter[str] = Counter()
    for counts in existing.values():
        total.update(counts)
    # Rounding is by class, and assigned images keep their split: five classes are off by at most 2.5 images. Where a
    # split could round to no image at all, each class may have given it one.
    most = Fraction(len(LABELS), 2)
    first = next((sum(new.values()) for new in steps if new), 0)
    is_small = any(0 < share * first <= most for share in rule.shares.values())
    for split in ORDER:
        assert abs(total[split] - rule.shares[split] * total.total()) <= most + is_small * 2 * len(LABELS)


def test_classes_of_one_image_train_on_it() -> None:
    """None of 220 such classes loses its image to val or test, which larger classes fill."""
    assigned = assign({}, dict.fromkeys([f"{number:03}" for number in range(220)], 1) | {"large": 60}, TENTHS)
    assert assigned.pop("large") == {TRAIN: 48, VAL: 6, TEST: 6}
    assert set(map(str, assigned.values())) == {str({TRAIN: 1})}


@given(st.dictionaries(st.sampled_from(LABELS), st.integers(1, 3), min_size=1), rules)
def test_every_class_has_an_image_to_train_on(new, rule) -> None:
    """So it is whatever the shares, and a class of an older table that has none gets the next image there."""
    older = {label: {TEST: 2, VAL: 1} for label in LABELS[:2]}
    assigned = assign(older, new, rule)
    assert all(assigned[label].get(TRAIN) for label in new)


def test_thirty_images_in_each_of_six_classes() -> None:
    """Each class of 30 images has 3 in val and 3 in test."""
    existing = assign({}, dict.fromkeys("abcdef", 30), TENTHS)
    assert set(map(str, existing.values())) == {str({TEST: 3, VAL: 3, TRAIN: 24})}


def test_classes_smaller_than_a_share_have_test_images_together() -> None:
    """A hundred classes of three images give 30 images to val and to test, and at least 2 per class to train."""
    existing = assign({}, {f"{number:03}": 3 for number in range(100)}, TENTHS)
    total: Counter[str] = Counter()
    for counts in existing.values():
        total.update(counts)
        assert counts[TRAIN] >= 2
    assert total == {TRAIN: 240, VAL: 30, TEST: 30}


@given(
    st.dictionaries(st.sampled_from(LABELS), st.fixed_dictionaries(dict.fromkeys(ORDER, st.integers(0, 60)))),
    st.dictionaries(st.sampled_from(LABELS), st.integers(1, 60)),
    rules,
)
def test_after_deletions_new_images_go_to_the_splits_with_a_deficit(existing, new, rule) -> None:
    """A split that gets an image was not fuller, relative to its share, than any other split is afterwards."""
    after = assign(existing, new, rule)
    for label in new:
        got = [split for split in ORDER if after[label].get(split, 0) > existing.get(label, {}).get(split, 0)]
        for split, other in ((split, other) for split in got for other in ORDER if rule.shares[other]):
            fullness = (after[label][split] - 1) / rule.shares[split]
            assert fullness <= (after[label].get(other, 0) + 1) / rule.shares[other]


@pytest.mark.parametrize(
    ("per_class", "expected"),
    [
        (1, {TRAIN: 2, VAL: 0, TEST: 0}),
        (2, {TRAIN: 2, VAL: 1, TEST: 1}),
        (3, {TRAIN: 3, VAL: 2, TEST: 1}),
        (5, {TRAIN: 8, VAL: 1, TEST: 1}),
        (10, {TRAIN: 16, VAL: 2, TEST: 2}),
        (20, {TRAIN: 32, VAL: 4, TEST: 4}),
    ],
)
def test_no_split_of_two_small_classes_is_empty(per_class: int, expected: Counts) -> None:
    """A split that would have no image gets one of each class that can spare it; others keep their fraction."""
    assigned = assign({}, {"cat": per_class, "dog": per_class}, TENTHS)
    assert {split: sum(counts.get(split, 0) for counts in assigned.values()) for split in ORDER} == expected
    assert all(counts[TRAIN] for counts in assigned.values())


@given(st.dictionaries(st.sampled_from(LABELS), st.integers(1, 12), min_size=1), increments, rules)
def test_no_split_is_empty_if_there_is_an_image_for_it_beside_one_of_each_class_to_train_on(new, later, rule) -> None:
    """Of fractions above 0; those of older tables are filled by the next images. No image of a class is taken away."""
    existing = {label: {TRAIN: number} for increment in later[:1] for label, number in increment.items()}
    after = assign(existing, new, rule)
    assert all(after[label][TRAIN] for label in new)
    spare = sum(new.values()) - len(new.keys() - existing.keys())
    filled = [split for split in (VAL, TEST) if rule.shares[split] and any(c.get(split) for c in after.values())]
    assert len(filled) >= min(spare, sum(rule.shares[split] > 0 for split in (VAL, TEST)))


def test_split_with_a_share_of_zero_gets_no_images() -> None:
    """With shares of 0, all images are in the split `train`, and so is a single image with the default shares."""
    rule = SplitRule.of(EtlConfig(val_fraction=0.0, test_fraction=0.0))
    assert assign({}, {"cat": 10}, rule) == {"cat": {TRAIN: 10}}
    assert assign({}, {"cat": 1}, TENTHS) == {"cat": {TRAIN: 1}}


def test_millions_of_images_are_apportioned_at_once() -> None:
    """The time does not depend on the number of images, also if a split has far too few or too many."""
    existing = {"cat": {TRAIN: 5_000_000, VAL: 1, TEST: 0}, "dog": {TRAIN: 0, VAL: 0, TEST: 4_000_000}}
    after = assign(existing, {"cat": 3_000_000, "dog": 3_000_000}, TENTHS)
    assert after["cat"] == {TRAIN: 6_400_001, VAL: 800_000, TEST: 800_000}
    assert after["dog"] == {TRAIN: 2_666_667, VAL: 333_333, TEST: 4_000_000}
