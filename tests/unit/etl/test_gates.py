"""What must hold of the files of a source, decided on counts."""

import pytest

from tasks.config.etl import EtlConfig
from tasks.errors import WrongInput
from tasks.etl.gates import FileCounts, check_bad_fraction, check_class_sizes, small_splits


def counts(*groups: tuple[str | None, str, str | None, int], kept: tuple[tuple[str, int], ...] = ()) -> FileCounts:
    """Sum groups of files of the split train, and images kept of the split val."""
    return FileCounts.of_groups(
        [(label, "train", *rest) for label, *rest in groups], [(label, "val", number) for label, number in kept]
    )


def test_share_of_bad_files_may_be_reached_and_not_exceeded() -> None:
    """1 of 10 passes at 0.1, and 2 of 10 do not; the sentence says which they are."""
    good, bad = ("cat", "stored", None, 9), ("cat", "quarantined", "truncated", 1)
    check_bad_fraction(counts(good, bad), EtlConfig())
    worse = counts(("cat", "stored", None, 8), bad, (None, "quarantined", "label_missing", 1))

    with pytest.raises(WrongInput, match=r"2 of 10 files cannot be used \(1 label_missing, 1 truncated\), more than"):
        check_bad_fraction(worse, EtlConfig())


def test_duplicates_are_good_files_and_no_more_images() -> None:
    """Copies do not make a class larger, nor a source worse."""
    summed = counts(("cat", "stored", None, 1), ("cat", "duplicate", None, 9))

    check_bad_fraction(summed, EtlConfig(max_bad_fraction=0.0))
    with pytest.raises(WrongInput, match=r"1 of 1 classes have fewer .* 2 \('cat' 1\)"):
        check_class_sizes(summed, EtlConfig(min_images_per_class=2))


def test_class_with_bad_files_only_has_no_images() -> None:
    """It would vanish from the classes without a word; the default sets no bound."""
    summed = counts(("cat", "stored", None, 3), ("dog", "quarantined", "zero_bytes", 2))

    check_class_sizes(summed, EtlConfig())
    with pytest.raises(WrongInput, match=r"1 of 2 classes .*\('dog' 0\): add images, take the classes out"):
        check_class_sizes(summed, EtlConfig(min_images_per_class=1))


def test_kept_images_count() -> None:
    """They are in the table that training reads."""
    summed = counts(("cat", "stored", None, 1), kept=(("cat", 2), ("dog", 3)))
    assert summed.classes == {"cat": {"train": 1, "val": 2}, "dog": {"val": 3}}

    check_class_sizes(summed, EtlConfig(min_images_per_class=3))
    assert summed.images == {"cat": 3, "dog": 3}


def test_a_few_classes_are_named_and_the_others_counted() -> None:
    """A thousand names help nobody."""
    summed = counts(*((f"class-{number}", "stored", None, 1) for number in range(8)))

    with pytest.raises(WrongInput, match=r"'class-4' 1 and 3 more\)"):
        check_class_sizes(summed, EtlConfig(min_images_per_class=2))


def split_counts(**classes: tuple[int, int]) -> FileCounts:
    """Return counts of classes with so many images in train and test."""
    groups = [
        (label, split, "stored", None, number)
        for label, numbers in classes.items()
        for split, number in zip(("train", "test"), numbers, strict=True)
        if number
    ]
    return FileCounts.of_groups(groups, [])


def test_a_small_split_test_is_warned_of_with_its_interval() -> None:
    """11 images, of which 90 % are right: from 0.60 to 0.98 by Wilson's formula."""
    (warning,) = small_splits(split_counts(cat=(30, 4), dog=(30, 7)), EtlConfig())
    assert warning.startswith(
        "the split 'test' has 11 images in all: the 95 % interval (Wilson) of an accuracy of 0.90 measured on them "
        "goes from 0.61 to 0.98 and is 0.37 wide; add images, or raise etl.test_fraction"
    )
    assert small_splits(split_counts(cat=(30, 15), dog=(30, 15)), EtlConfig()) == []


def test_an_empty_split_test_is_warned_of() -> None:
    """Nothing has an interval there."""
    (warning,) = small_splits(split_counts(cat=(3, 0), dog=(3, 0)), EtlConfig())
    assert warning.startswith("the split 'test' has 0 images in all: nothing can be measured on them; add images")


def test_small_classes_are_warned_of_with_the_interval_of_the_smallest() -> None:
    """That is those with fewer than etl.min_images_per_class for each of the three splits; 0 sets no bound."""
    summed = split_counts(cat=(20, 5), dog=(200, 40), eel=(12, 9))
    assert small_splits(summed, EtlConfig()) == []
    (warning,) = small_splits(summed, EtlConfig(min_images_per_class=10))
    assert warning.startswith(
        "2 of 3 classes have fewer images than etl.min_images_per_class 10 for each of the 3 splits ('eel' 21, "
        "'cat' 25), and one of them has 5 test images: the 95 % interval (Wilson) of a recall of 0.90"
    )
