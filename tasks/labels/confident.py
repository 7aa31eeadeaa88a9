"""Confident learning: images whose label the images around them speak against.

Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels" (2021), sections 3.1 and
3.2, here on features of a frozen backbone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.verdict.probe import Features, Labels, split_folds, train_probe

Probabilities = npt.NDArray[np.float64]

STRENGTH = 0.003
"""Inverse strength of the L2 regularisation of a probe, on standardised features.

A weaker one learns wrong labels. Of 0.0003 to 0.01, this and 0.001 find the most of 5 and 10 % flipped labels (LOG.md).
"""

MAX_TRAINED = 20_000
"""Images that a probe is trained on; of more, a part with the class fractions of all: its time grows with them."""

SMALLEST = 1e-12
"""Smallest probability whose logarithm is taken."""


@dataclass(frozen=True)
class LabelErrors:
    """S suspected labels, the most suspicious first.

    Attributes:
        rows_S: Rows of the images.
        suggested_S: Class of each image that is more probable than its label.
        scores_S: Logarithm of the label's probability by that of this class, ascending and below 0.
        num_expected: Number of wrong labels among all images.
    """

    rows_S: Labels
    suggested_S: Labels
    scores_S: npt.NDArray[np.float64]
    num_expected: float


def probabilities_of_others(features_NF: Features, labels_N: Labels, num_classes: int, seed: int) -> Probabilities:
    """Return the probabilities of the classes of each image, by a probe of images of other folds, float64 (N, K).

    Args:
        features_NF: Features.
        labels_N: Given labels, classes from 0.
        num_classes: Number of classes.
        seed: Seed of the folds.
    """
    from threadpoolctl import threadpool_limits

    found_NK = np.zeros((len(labels_N), num_classes))
    for rows, held_out in split_folds(labels_N, np.random.default_rng(seed)):
        part = rows[:MAX_TRAINED]
        classes = np.unique(labels_N[part])
        if len(classes) == 1:  # A regression needs two.
            found_NK[held_out, classes[0]] = 1.0
            continue
        with threadpool_limits(1):  # Products this small are slower with several.
            model = train_probe(features_NF[part], labels_N[part], STRENGTH)
            found_NK[np.ix_(held_out, classes)] = model.predict_proba(features_NF[held_out])
    return found_NK


def find_label_errors(probabilities_NK: Probabilities, labels_N: Labels) -> LabelErrors:
    """Return the images for which another class is more probable than their label.

    The expected number is that of the confident joint. There, an image counts for a class if its probability is at
    least the mean one of the images with this label. So a class that is hard is not suspected as a whole.

    Args:
        probabilities_NK: As `probabilities_of_others`.
        labels_N: Given labels.
    """
    images, num_classes = np.arange(len(labels_N)), probabilities_NK.shape[1]
    own_N = probabilities_NK[images, labels_N]
    others_NK = probabilities_NK.copy()
    others_NK[images, labels_N] = -1.0
    suggested_N = others_NK.argmax(axis=1)
    scores_N = _log(own_N) - _log(others_NK.max(axis=1))
    rows = np.flatnonzero(scores_N < 0)
    rows_S = rows[np.argsort(scores_N[rows], kind="stable")]

    counts_K = np.bincount(labels_N, minlength=num_classes)
    sums_K = np.bincount(labels_N, own_N, minlength=num_classes)
    # No image counts for a class without labels.
    thresholds_K = np.divide(sums_K, counts_K, out=np.full(num_classes, np.inf), where=counts_K > 0)
    confident_NK = np.where(probabilities_NK >= thresholds_K, probabilities_NK, -1.0)
    counted = confident_NK.max(axis=1) >= 0
    joint_KK = np.zeros((num_classes, num_classes))
    np.add.at(joint_KK, (labels_N[counted], confident_NK[counted].argmax(axis=1)), 1)
    # Images that count for no class are as often wrong as the others of their label.
    shares_K = 1 - np.divide(
        joint_KK.diagonal(), joint_KK.sum(axis=1), out=np.ones(num_classes), where=joint_KK.sum(axis=1) > 0
    )
    return LabelErrors(rows_S, suggested_N[rows_S], scores_N[rows_S], float(shares_K @ counts_K))


def _log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.log(np.maximum(values, SMALLEST)))
