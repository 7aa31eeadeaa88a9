"""How many images of each class every split gets, over random histories of a table."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tasks.config.etl import EtlConfig
from tasks.etl.stratify import ORDER, Counts, SplitRule, deal_classes
from tasks.schema import TEST, TRAIN, VAL

LABELS = [f"class-{number}" for number in range(5)]

TENTHS = SplitRule.of(EtlConfig())

rules = st.tuples(st.integers(0, 49), st.integers(0, 50)).map(
    lambda shares: SplitRule.of(EtlConfig(val_fraction=shares[0] / 100, test_fraction=shares[1] / 100))
)
increments = st.lists(st.dictionaries(st.sampled_from(LABELS), st.integers(1, 40), max_size=5), max_size=8)


def deal(held: dict[str, Counts], new: dict[str, int], rule: SplitRule) -> dict[str, Counts]:
    """Deal; return what each class's splits have then, with every rank given to exactly one split."""
    after = {label: dict(counts) for label, counts in held.items()}
    ranks: dict[str, list[int]] = {}
    for label, split, first, last in deal_classes(held, new, rule):
        ranks.setdefault(label, []).extend(range(first, last))
        counts = after.setdefault(label, {})
        counts[split] = counts.get(split, 0) + last - first
    assert ranks == {label: list(range(number)) for label, number in new.items()}
    return after


def check_shares(held: dict[str, Counts], rule: SplitRule) -> None:
    """Each split of each class has its exact share, rounded down or up."""
    for counts in held.values():
        for split in ORDER:
            assert abs(counts.get(split, 0) - rule.shares[split] * sum(counts.values())) < 1


@given(increments, rules)
def test_the_fractions_hold_to_one_image_in_every_class_after_every_increment(steps, rule) -> None:
    """However many images come at once, and of whatever classes."""
    held: dict[str, Counts] = {}
    for new in steps:
        held = deal(held, new, rule)
        check_shares(held, rule)


@given(increments, rules)
def test_the_fractions_hold_of_the_table_as_a_whole(steps, rule) -> None:
    """Also where classes are smaller than the share of a split: what one class lacks, the next one gets."""
    held: dict[str, Counts] = {}
    for new in steps:
        held = deal(held, new, rule)
    total: Counter[str] = Counter()
    for counts in held.values():
        total.update(counts)
    # Rounding is by class, and what has a split keeps it: of five classes at most 2.5 images are in question.
    for split in ORDER:
        assert abs(total[split] - rule.shares[split] * total.total()) <= Fraction(len(LABELS), 2)


def test_thirty_images_in_each_of_six_classes() -> None:
    """Each class gives val and test 3, however small the data set is."""
    held = deal({}, dict.fromkeys("abcdef", 30), TENTHS)
    assert set(map(str, held.values())) == {str({TEST: 3, VAL: 3, TRAIN: 24})}


def test_classes_smaller_than_a_share_have_test_images_together() -> None:
    """A hundred classes of three images: 30 images in val and in test, from different classes, and no class empty."""
    held = deal({}, {f"{number:03}": 3 for number in range(100)}, TENTHS)
    total: Counter[str] = Counter()
    for counts in held.values():
        total.update(counts)
        assert counts[TRAIN] >= 2
    assert total == {TRAIN: 240, VAL: 30, TEST: 30}


@given(
    st.dictionaries(st.sampled_from(LABELS), st.fixed_dictionaries(dict.fromkeys(ORDER, st.integers(0, 60)))),
    st.dictionaries(st.sampled_from(LABELS), st.integers(1, 60)),
    rules,
)
def test_after_deletions_new_images_go_where_they_are_missing(held, new, rule) -> None:
    """A split that gets an image was not fuller, in relation to its share, than any other is afterwards."""
    after = deal(held, new, rule)
    for label in new:
        got = [split for split in ORDER if after[label].get(split, 0) > held.get(label, {}).get(split, 0)]
        for split, other in ((split, other) for split in got for other in ORDER if rule.shares[other]):
            fullness = (after[label][split] - 1) / rule.shares[split]
            assert fullness <= (after[label].get(other, 0) + 1) / rule.shares[other]


def test_a_split_without_a_share_gets_nothing() -> None:
    """And a single image is trained on."""
    rule = SplitRule.of(EtlConfig(val_fraction=0.0, test_fraction=0.0))
    assert deal({}, {"cat": 10}, rule) == {"cat": {TRAIN: 10}}
    assert deal({}, {"cat": 1}, TENTHS) == {"cat": {TRAIN: 1}}


def test_millions_of_images_are_shared_out_at_once() -> None:
    """Also where nearly all of a split were deleted, or a class has far too many in one split."""
    held = {"cat": {TRAIN: 5_000_000, VAL: 1, TEST: 0}, "dog": {TRAIN: 0, VAL: 0, TEST: 4_000_000}}
    after = deal(held, {"cat": 3_000_000, "dog": 3_000_000}, TENTHS)
    assert after["cat"] == {TRAIN: 6_400_001, VAL: 800_000, TEST: 800_000}
    assert after["dog"] == {TRAIN: 2_666_667, VAL: 333_333, TEST: 4_000_000}
