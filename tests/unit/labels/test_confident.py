"""Confident learning: flipped labels are found, and clean ones are left alone."""

import numpy as np
import pytest

from tasks.labels.confident import Probabilities, find_label_errors, probabilities_of_others
from tasks.verdict.probe import Features, Labels

NUM_CLASSES, PER_CLASS = 6, 60


def clusters(seed: int) -> tuple[Features, Labels]:
    """Return features and classes of images, of which neighbouring classes are alike."""
    rng = np.random.default_rng(seed)
    labels_N = np.repeat(np.arange(NUM_CLASSES), PER_CLASS)
    centers_KF = rng.normal(size=(NUM_CLASSES, 16)) + 0.5 * rng.normal(size=(NUM_CLASSES // 2, 16)).repeat(2, axis=0)
    features_NF = centers_KF[labels_N] + 0.6 * rng.normal(size=(len(labels_N), 16))
    return features_NF.astype(np.float32), labels_N


@pytest.mark.parametrize("share", [0.05, 0.1])
@pytest.mark.parametrize("shift", [None, 1], ids=["any class", "the next class"])
def test_flipped_labels_are_the_most_suspicious(share: float, shift: int | None) -> None:
    """As many as were flipped, with the class that they had, and the expected number is near."""
    features_NF, true_N = clusters(1)
    rng = np.random.default_rng(2)
    flipped = rng.choice(len(true_N), round(share * len(true_N)), replace=False)
    labels_N = true_N.copy()
    shifts = rng.integers(1, NUM_CLASSES, len(flipped)) if shift is None else shift
    labels_N[flipped] = (labels_N[flipped] + shifts) % NUM_CLASSES
    found = find_label_errors(probabilities_of_others(features_NF, labels_N, NUM_CLASSES, 0), labels_N)

    top = found.rows_S[: len(flipped)]
    right = np.isin(top, flipped)
    assert right.mean() >= 0.8
    assert (found.suggested_S[: len(top)][right] == true_N[top][right]).mean() >= 0.9
    assert (np.diff(found.scores_S) >= 0).all()
    assert (found.scores_S < 0).all()
    assert 0.6 * len(flipped) < found.num_expected < 1.8 * len(flipped)


def test_clean_labels_are_hardly_suspected() -> None:
    """And few of them are expected to be wrong."""
    features_NF, labels_N = clusters(3)
    found = find_label_errors(probabilities_of_others(features_NF, labels_N, NUM_CLASSES, 0), labels_N)

    assert found.num_expected < 0.03 * len(labels_N)
    assert len(found.rows_S) < 0.05 * len(labels_N)


def given(*rows: tuple[float, ...]) -> Probabilities:
    """Return probabilities."""
    return np.array(rows)


def test_a_hard_class_is_not_expected_to_be_wrong_as_a_whole() -> None:
    """Its images count at the probability that is usual for it; those of no class have no threshold."""
    probabilities_NK = given((0.9, 0.1, 0), (0.8, 0.2, 0), (0.6, 0.4, 0), (0.6, 0.4, 0), (0.1, 0.9, 0))
    labels_N = np.array([0, 0, 1, 1, 0])
    found = find_label_errors(probabilities_NK, labels_N)

    assert found.rows_S.tolist() == [4, 2, 3]
    assert found.suggested_S.tolist() == [1, 0, 0]
    assert found.num_expected == pytest.approx(1.0)


@pytest.mark.parametrize("num", [2, 3])
def test_classes_of_an_image_have_answers(num: int) -> None:
    """A fold may have no other image of a class, or one class alone."""
    features_NF = np.eye(num, 4, dtype=np.float32)
    labels_N = np.array([0, 1, 1][:num])
    probabilities_NK = probabilities_of_others(features_NF, labels_N, 3, 0)

    assert probabilities_NK.shape == (num, 3)
    assert probabilities_NK.sum(axis=1) == pytest.approx(1.0)
    assert find_label_errors(probabilities_NK, labels_N).num_expected <= num
