"""The linear probe: folds and nested shares, and its held-out answers."""

import numpy as np
import pytest

from tasks.verdict.probe import MAX_REPEATS, judge, split_folds, stratified_order


def clouds(counts: list[int], spread: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return features around a random centre per class, float32 (N, 20), and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    centres = rng.normal(size=(len(counts), 20))
    return (centres[labels] + spread * rng.normal(size=(len(labels), 20))).astype(np.float32), labels


def test_each_beginning_of_the_order_has_the_class_fractions():
    """A share of the images has its share of each class, to one image, and each image is there once."""
    labels = np.repeat([0, 1, 2], [60, 30, 6])
    order = stratified_order(labels, np.random.default_rng(1))

    assert sorted(order) == list(range(96))
    for length in (16, 32, 48):
        counts = np.bincount(labels[order[:length]], minlength=3)
        assert np.abs(counts - length / 96 * np.array([60, 30, 6])).max() <= 1


def test_each_image_is_held_out_once_and_trained_on_in_the_other_folds():
    """Each fold has its part of each class; the only image of a class is held out as well."""
    labels = np.repeat([0, 1, 2], [10, 5, 1])
    folds = list(split_folds(labels, np.random.default_rng(1)))

    assert sorted(np.concatenate([held_out for _, held_out in folds])) == list(range(16))
    for rows, held_out in folds:
        assert sorted([*rows, *held_out]) == list(range(16))
        assert (labels[held_out] == 0).sum() == 2
        assert (labels[held_out] == 1).sum() == 1


def test_error_falls_with_the_share_and_the_answers_depend_only_on_the_seed():
    """Larger shares learn more; the same seed gives the same answers, another one other folds."""
    features, labels = clouds([100, 100, 100], spread=2.0)

    judged = judge(features, labels, seed=3)

    assert judged.sizes_S.tolist() == [15, 30, 60, 120, 240]
    errors = judged.wrong_RSN.mean(axis=(0, 2))
    assert errors[0] > errors[2] > errors[4] > 0
    assert np.array_equal(judged.predicted_RSN, judge(features, labels, seed=3).predicted_RSN)
    assert not np.array_equal(judged.predicted_RSN, judge(features, labels, seed=4).predicted_RSN)


@pytest.mark.parametrize("counts", [[3, 2], [1, 1], [1, 1, 1, 6], [5], [2, 0, 2]], ids=str)
def test_few_images_are_judged(counts):
    """Classes with one image, or a single class, give answers; the only image of a class is always mistaken."""
    features, labels = clouds(counts, spread=0.01)

    judged = judge(features, labels, seed=1)

    assert judged.predicted_RSN[:, -1].shape == (MAX_REPEATS, len(labels))
    only = np.isin(labels, [index for index, count in enumerate(counts) if count == 1])
    assert judged.wrong_RSN[:, :, only].all()
    assert set(np.unique(judged.predicted_RSN)) <= set(labels)
