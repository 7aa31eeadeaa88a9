"""Apportionment of each class's images to splits, over random histories of a table."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config.etl import EtlConfig
from tasks.etl.stratify import ORDER, Counts, Group, SplitRule, apportion_classes, deal_groups
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


def deal(groups: list[Counts], rule: SplitRule, existing: dict[str, Counts], singles: dict[str, int]) -> list[str]:
    """Deal the groups, whose draws are their numbers, beside single images; return the split of each."""
    new = Counter(singles)
    for sizes in groups:
        new.update(sizes)
    numbered = [Group(number, number, sizes) for number, sizes in enumerate(groups)]
    dealt = deal_groups(existing, new, numbered, rule)
    assert dealt == deal_groups(existing, new, numbered[::-1], rule)
    return [dealt[number] for number in range(len(groups))]


def placed(groups: list[Counts], splits: list[str]) -> dict[str, Counts]:
    """Return the number of images of each class in each split."""
    counts: dict[str, Counts] = {}
    for sizes, split in zip(groups, splits, strict=True):
        for label, images in sizes.items():
            of_class = counts.setdefault(label, dict.fromkeys(ORDER, 0))
            of_class[split] += images
    return counts


groups_of_one_class = st.lists(
    st.tuples(st.sampled_from(LABELS[:3]), st.integers(2, 30)).map(lambda drawn: {drawn[0]: drawn[1]}), max_size=60
)
evenly = rules.filter(lambda rule: rule.shares[TRAIN] >= Fraction(1, 2))


@given(groups_of_one_class, evenly)
def test_splits_differ_from_their_share_of_a_class_by_less_than_two_of_its_largest_groups(groups, rule) -> None:
    """The order of the groups changes nothing, and each class has images to train on."""
    for label, counts in placed(groups, deal(groups, rule, {}, {})).items():
        largest = max(sizes.get(label, 0) for sizes in groups)
        assert counts[TRAIN]
        for split in ORDER:
            assert abs(counts[split] - rule.shares[split] * sum(counts.values())) < 2 * largest


@given(st.integers(1, 30), st.integers(2, 9), st.integers(1, 3))
def test_val_and_test_have_images_where_a_class_can_spare_a_group(per_class: int, size: int, num_classes: int) -> None:
    """Classes with too few groups for each split share them, so that the fractions hold to one group per class."""
    groups = [{label: size} for label in LABELS[:num_classes] for _ in range(per_class)]
    table: Counter[str] = Counter()
    for counts in placed(groups, deal(groups, TENTHS, {}, {})).values():
        table.update(counts)
    spare = num_classes * (per_class - 1)
    for number, split in enumerate((TEST, VAL)):
        assert table[split] >= min(size, size * max(0, spare - number))
        assert abs(table[split] - TENTHS.shares[split] * table.total()) <= num_classes * size


def test_ten_equal_groups_of_a_class_are_eight_one_and_one() -> None:
    """Their draws decide which: the first by draw is in train, the largest quotient with a group comes last."""
    splits = deal([{"cat": 5}] * 10, TENTHS, {}, {})
    assert Counter(splits) == {TRAIN: 8, VAL: 1, TEST: 1}
    assert splits[0] == TRAIN


def test_large_groups_are_in_every_split() -> None:
    """Val and test get large and small groups, since all are dealt in proportion."""
    groups = [{"cat": size} for size in [20] * 20 + [2] * 20]
    splits = deal(groups, TENTHS, {}, {})
    for split in ORDER:
        assert {sizes["cat"] for sizes, found in zip(groups, splits, strict=True) if found == split} == {2, 20}
    assert placed(groups, splits) == {"cat": {TEST: 44, VAL: 44, TRAIN: 352}}


def test_class_of_one_group_trains_on_it() -> None:
    """And a group that is larger than val and test is in train, whatever the other groups."""
    assert deal([{"cat": 40}, {"dog": 5}, {"dog": 5}, {"dog": 5}], TENTHS, {}, {}) == [TRAIN, TRAIN, VAL, TEST]
    splits = deal([{"cat": 100}] + [{"cat": 5}] * 40, TENTHS, {}, {})
    assert splits[0] == TRAIN
    assert Counter(splits[1:]) == {TRAIN: 28, VAL: 6, TEST: 6}


def test_group_of_several_labels_counts_for_each_of_them() -> None:
    """Twenty patients with images of both classes give two to val and to test, for both fractions."""
    groups = [{"cat": 3, "dog": 2} for _ in range(20)]
    counts = placed(groups, deal(groups, TENTHS, {}, {}))
    assert counts == {"cat": {TEST: 6, VAL: 6, TRAIN: 48}, "dog": {TEST: 4, VAL: 4, TRAIN: 32}}


def test_new_groups_go_to_the_splits_that_lack_images() -> None:
    """Images that have a split count, so that ten more groups of a class without val and test fill these."""
    splits = deal([{"cat": 5}] * 10, TENTHS, {"cat": {TRAIN: 50}}, {})
    assert Counter(splits) == {TRAIN: 6, VAL: 2, TEST: 2}


def test_group_goes_to_the_split_that_it_brings_nearest_to_its_share() -> None:
    """Five images in val and in test, and 20 in train, are nearer to 3, 3 and 24 than none and 30."""
    splits = deal([{"cat": 5}] * 6, TENTHS, {"cow": {TRAIN: 80, VAL: 10, TEST: 10}}, {})
    assert splits == [TRAIN] * 4 + [TEST, VAL]


def test_single_images_fill_the_splits_that_groups_leave_empty() -> None:
    """Then no group is taken out of train for them."""
    groups = [{"cat": 5}, {"cat": 5}]
    assert deal(groups, TENTHS, {}, {"cat": 90}) == [TRAIN, TRAIN]
    assert deal(groups * 2, TENTHS, {}, {}) == [TRAIN, TRAIN, VAL, TEST]


def test_share_of_zero_gets_no_group() -> None:
    """All groups train."""
    rule = SplitRule.of(EtlConfig(val_fraction=0.0, test_fraction=0.0))
    assert deal([{"cat": 5}] * 10, rule, {}, {}) == [TRAIN] * 10
