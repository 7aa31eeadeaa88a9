"""Quality gates on the files of a source, as functions of counts."""

from collections import Counter

import pytest

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.gates import (
    FileCounts,
    GroupReport,
    check_bad_fraction,
    check_class_sizes,
    check_deletions,
    check_groups_fit,
    group_warnings,
    small_split_warnings,
)


def counts(*groups: tuple[str | None, str, str | None, int], kept: tuple[tuple[str, int], ...] = ()) -> FileCounts:
    """Return counts of groups of files of the split train, and of kept images of the split val."""
    return FileCounts.of_groups(
        [(label, "train", *rest) for label, *rest in groups], [(label, "val", number) for label, number in kept]
    )


def test_bad_fraction_is_an_inclusive_bound() -> None:
    """1 bad file of 10 passes at 0.1 and 2 of 10 do not; the message has the reasons."""
    good, bad = ("cat", "stored", None, 9), ("cat", "quarantined", "truncated", 1)
    check_bad_fraction(counts(good, bad), EtlConfig())
    worse = counts(("cat", "stored", None, 8), bad, (None, "quarantined", "label_missing", 1))

    with pytest.raises(WrongInput, match=r"2 of 10 .* \(1 label_missing, 1 truncated\)") as refused:
        check_bad_fraction(worse, EtlConfig())
    assert refused.value.setting == "etl.max_bad_fraction"


def test_duplicates_count_as_usable_files_but_not_as_images() -> None:
    """Duplicates increase neither the size of a class nor the fraction of bad files."""
    summed = counts(("cat", "stored", None, 1), ("cat", "duplicate", None, 9))

    check_bad_fraction(summed, EtlConfig(max_bad_fraction=0.0))
    with pytest.raises(WrongInput, match=r"1 of 1 classes have fewer .* 2 \('cat' 1\)"):
        check_class_sizes(summed, EtlConfig(min_images_per_class=2))


def test_class_with_bad_files_only_has_no_images() -> None:
    """A class without usable files is refused by min_images_per_class, and accepted by default."""
    summed = counts(("cat", "stored", None, 3), ("dog", "quarantined", "zero_bytes", 2))

    check_class_sizes(summed, EtlConfig())
    with pytest.raises(WrongInput, match=r"1 of 2 classes .*\('dog' 0\)") as refused:
        check_class_sizes(summed, EtlConfig(min_images_per_class=1))
    assert refused.value.setting == "etl.min_images_per_class"


def test_kept_images_count() -> None:
    """Kept images count in the size of their class, since training reads them."""
    summed = counts(("cat", "stored", None, 1), kept=(("cat", 2), ("dog", 3)))
    assert summed.classes == {"cat": {"train": 1, "val": 2}, "dog": {"val": 3}}

    check_class_sizes(summed, EtlConfig(min_images_per_class=3))
    assert summed.images == {"cat": 3, "dog": 3}


def test_message_names_a_few_classes_and_counts_the_others() -> None:
    """A message about many classes names the first five and the number of the others."""
    summed = counts(*((f"class-{number}", "stored", None, 1) for number in range(8)))

    with pytest.raises(WrongInput, match=r"'class-4' 1 and 3 more\)"):
        check_class_sizes(summed, EtlConfig(min_images_per_class=2))


def split_counts(**classes: tuple[int, int]) -> FileCounts:
    """Return counts of classes with the given numbers of images in train and test."""
    groups = [
        (label, split, "stored", None, number)
        for label, numbers in classes.items()
        for split, number in zip(("train", "test"), numbers, strict=True)
        if number
    ]
    return FileCounts.of_groups(groups, [])


def test_warning_of_a_small_split_test_has_the_confidence_interval() -> None:
    """An accuracy of 0.90 on 11 images has a Wilson interval from 0.61 to 0.98."""
    (warning,) = small_split_warnings(split_counts(cat=(30, 4), dog=(30, 7)), EtlConfig())
    assert warning.startswith(
        "the split 'test' has 11 images in all: the 95 % interval (Wilson) of an accuracy of 0.90 measured on them "
        "goes from 0.61 to 0.98 and is 0.37 wide; add images, or raise etl.test_fraction"
    )
    assert small_split_warnings(split_counts(cat=(30, 15), dog=(30, 15)), EtlConfig()) == []


def test_empty_split_test_gives_a_warning() -> None:
    """The warning of an empty split `test` has no interval."""
    (warning,) = small_split_warnings(split_counts(cat=(3, 0), dog=(3, 0)), EtlConfig())
    assert warning.startswith("the split 'test' has 0 images in all: nothing can be measured on them; add images")


def test_warning_of_small_classes_has_the_interval_of_the_smallest() -> None:
    """Classes with fewer than etl.min_images_per_class per split give a warning; 0 disables it."""
    summed = split_counts(cat=(20, 5), dog=(200, 40), eel=(12, 9))
    assert small_split_warnings(summed, EtlConfig()) == []
    (warning,) = small_split_warnings(summed, EtlConfig(min_images_per_class=10))
    assert warning.startswith(
        "2 of 3 classes have fewer images than etl.min_images_per_class 10 for each of the 3 splits ('eel' 21, "
        "'cat' 25), and one of them has 5 test images: the 95 % interval (Wilson) of a recall of 0.90"
    )


def delete(before: dict[str, int], deleted: dict[str, int], **settings: float) -> None:
    """Check the deletion of so many images of each class."""
    after = Counter(before)
    after.subtract(deleted)
    check_deletions(Counter(deleted), Counter(before), after, EtlConfig(**settings))


@pytest.mark.parametrize(
    ("before", "deleted"),
    [
        ({"cat": 100, "dog": 100}, {}),
        ({"cat": 100, "dog": 100}, {"cat": 20, "dog": 20}),
        ({"cat": 6, "dog": 8}, {"cat": 5}),
        ({"cat": 25, "dog": 1000}, {"cat": 5, "dog": 200}),
    ],
    ids=["none", "the fraction itself", "five images", "each within its bound"],
)
def test_deletions_within_the_bound_pass(before: dict[str, int], deleted: dict[str, int]) -> None:
    """The fraction is inclusive, and five images may leave in any case."""
    assert delete(before, deleted) is None


@pytest.mark.parametrize(
    ("before", "deleted", "named"),
    [
        ({"cat": 100, "dog": 1000}, {"cat": 21, "dog": 1}, "22 of 1100 images, 'cat' 21 of 100"),
        ({"cat": 8, "dog": 1000}, {"cat": 6}, "6 of 1008 images, 'cat' 6 of 8"),
        ({"cat": 1, "dog": 1000}, {"cat": 1}, "1 of 1001 images, among them the last of a class ('cat' 1 of 1)"),
        ({"cat": 5, "dog": 50}, {"cat": 5}, "5 of 55 images, among them the last of a class ('cat' 5 of 5)"),
        ({"cat": 1, "dog": 100}, {"cat": 1, "dog": 21}, "22 of 101 images, 'dog' 21 of 100, 'cat' 1 of 1"),
        ({"a": 9, "b": 9, "c": 9}, {"a": 3, "b": 2, "c": 2}, "7 of 27 images, 'a' 3 of 9, 'b' 2 of 9, 'c' 2 of 9"),
        (
            dict.fromkeys(map(str, range(8)), 10),
            dict.fromkeys(map(str, range(8)), 10),
            "80 of 80 images, '0' 10 of 10, '1' 10 of 10, '2' 10 of 10, '3' 10 of 10, '4' 10 of 10 and 3 more",
        ),
    ],
    ids=["a class", "a small class", "the only image", "five of five images", "both", "the whole", "everything"],
)
def test_deletions_beyond_the_bound_are_a_question(before: dict[str, int], deleted: dict[str, int], named: str) -> None:
    """The message has classes, numbers, the setting and the way out; with 1 the same deletions pass."""
    with pytest.raises(WrongInput) as error:
        delete(before, deleted)

    allowed = "" if "the last of a class" in named else ", more than etl.max_deleted_fraction 0.2 allows"
    assert str(error.value) == (
        f"the table 'images' would lose {named}{allowed}: check that all of the source is there, such as a mounted "
        "class folder; if these images are to leave, set etl.max_deleted_fraction to 1 for one run; the tables are "
        "unchanged"
    )
    delete(before, deleted, max_deleted_fraction=1)


def test_a_class_that_moves_to_another_name_loses_no_image() -> None:
    """A class without any image left is accepted if none of its images leaves the table."""
    assert check_deletions(Counter(), Counter(cat=50, dog=50), Counter(feline=50, dog=50), EtlConfig()) is None


def found(**values: object) -> GroupReport:
    """Return a report of ten groups of at most 30 cats, with some values replaced."""
    report = {"num_groups": 10, "num_images": 90, "num_others": 0, "largest": {"cat": 30}, "complete": True}
    values = report | {"labels": (0, ""), "splits": (0, "")} | values
    return GroupReport(**values)  # type: ignore[arg-type]  # values of several types


def by_split(**images: int) -> FileCounts:
    """Return counts of so many cats in each split."""
    return FileCounts.of_groups([("cat", split, "stored", None, number) for split, number in images.items()], [])


def test_groups_that_leave_a_split_empty_are_refused() -> None:
    """The sentence has the largest group; a split with the fraction 0 may be empty."""
    check_groups_fit(found(), by_split(train=60, val=30, test=30), EtlConfig())
    check_groups_fit(found(), by_split(train=60, val=30), EtlConfig(test_fraction=0.0))

    with pytest.raises(
        WrongInput, match="10 groups of at most 30 images of a class leave none of 90 images for the split 'test'"
    ) as refused:
        check_groups_fit(found(), by_split(train=60, val=30), EtlConfig())
    assert refused.value.setting == "etl.split_group.by"
    assert str(refused.value).endswith("the tables are unchanged")


def test_warnings_name_groups_that_no_split_holds_and_those_of_several_labels_or_splits() -> None:
    """Classes that would have images in val and test without groups are named with their sizes."""
    whole = by_split(train=90)
    assert group_warnings(found(), by_split(train=60, val=30, test=30), EtlConfig()) == []
    assert group_warnings(found(largest={"cat": 1}), whole, EtlConfig()) == []
    assert group_warnings(found(), by_split(train=9), EtlConfig()) == []

    (large,) = group_warnings(found(), whole, EtlConfig())
    assert large.startswith("1 classes have no images in 'val' or 'test', since they are few or large groups")
    assert "('cat' 90, largest group 30)" in large
    labels, splits, incomplete = group_warnings(
        found(labels=(2, "'x' (cat 1, dog 2)"), splits=(1, "'y' (test 1, train 2)"), complete=False, largest={}),
        whole,
        EtlConfig(),
    )
    assert labels == "2 groups of etl.split_group have images of several labels, e.g. 'x' (cat 1, dog 2)"
    assert splits.startswith("1 groups of etl.split_group have images in several splits, e.g. 'y' (test 1, train 2): ")
    assert "not all near-duplicates were found" in incomplete
