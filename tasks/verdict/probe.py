"""A linear probe of features, judged on held-out images after training on nested shares of the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

NUM_FOLDS = 5
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the training images of a fold, each part of the next."""

MIN_REPEATS, MAX_REPEATS = 2, 10
IMAGES_PER_REPEAT = 6000
"""Repeats are as many as judge about this number of images: a small data set is split more often."""

STRENGTHS = (0.01, 0.1, 1.0)
"""Inverse strengths C of the L2 regularisation, on standardised features."""


@dataclass(frozen=True)
class Judged:
    """Held-out answers of the probe about N images after training on S shares, in R repeats."""

    sizes_S: npt.NDArray[np.float64]
    """Mean number of training images of each share, ascending."""
    labels_N: Labels
    predicted_RSN: npt.NDArray[np.int64]

    wrong_RSN: npt.NDArray[np.bool_]


def stratified_order(labels_N: Labels, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the images in an order whose beginnings all have nearly the class fractions of the whole, int64 (N,)."""
    shuffled = rng.permutation(len(labels_N))
    by_class = shuffled[np.argsort(labels_N[shuffled], kind="stable")]
    _, first, counts = np.unique(labels_N[by_class], return_index=True, return_counts=True)
    ranks = np.arange(len(by_class)) - np.repeat(first, counts)
    # One offset per class: images of classes with as many images are not neighbours.
    offsets = rng.random(len(counts))
    return by_class[np.argsort((ranks + np.repeat(offsets, counts)) / np.repeat(counts, counts), kind="stable")]


def split_folds(labels_N: Labels, rng: np.random.Generator) -> Iterator[tuple[Labels, Labels]]:
    """Yield the rows to train on, in a stratified order, and the held-out rows of each fold."""
    order = rng.permutation(len(labels_N))
    by_class = order[np.argsort(labels_N[order], kind="stable")]
    num_folds = min(NUM_FOLDS, len(labels_N))
    folds = np.empty(len(labels_N), dtype=np.int64)
    folds[by_class] = np.arange(len(labels_N)) % num_folds
    for fold in range(num_folds):
        rows = np.flatnonzero(folds != fold)
        yield rows[stratified_order(labels_N[rows], rng)], np.flatnonzero(folds == fold)


def train_probe(features_NF: Features, labels_N: Labels, strength: float) -> Any:
    """Return a logistic regression on standardised features, trained on images of at least two classes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # A probe is as good without the last digits.
    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000, tol=1e-3))
    return model.fit(features_NF, labels_N)


def predict_held_out(
    features_NF: Features, labels_N: Labels, held_out_MF: Features, strength: float
) -> npt.NDArray[np.int64]:
    """Train a logistic regression on standardised features, and return its answers about held-out ones, int64 (M,)."""
    if (labels_N == labels_N[0]).all():
        return np.full(len(held_out_MF), labels_N[0])
    return np.asarray(train_probe(features_NF, labels_N, strength).predict(held_out_MF))


def judge(features_NF: Features, labels_N: Labels, seed: int) -> Judged:
    """Return the answers of cross-validated probes about all images.

    The strength of the regularisation is chosen for each share, in the first repeat. Nested shares, each judged on the
    same held-out images, are those of Hestness et al., "Deep Learning Scaling is Predictable, Empirically" (2017).

    Args:
        features_NF: Features of at least two images.
        labels_N: Their classes.
        seed: Seed of folds and shares.
    """
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(seed)
    num_repeats = int(np.clip(IMAGES_PER_REPEAT // len(labels_N), MIN_REPEATS, MAX_REPEATS))
    num_classes = len(np.unique(labels_N))
    most = len(labels_N) - -(-len(labels_N) // min(NUM_FOLDS, len(labels_N)))
    # Smaller shares lack classes, and follow no power law.
    shares = [share for share in SHARES if share * most >= 2 * num_classes or share == 1]
    predicted_RSN = np.zeros((num_repeats, len(shares), len(labels_N)), dtype=np.int64)
    sizes: list[list[int]] = [[] for _ in shares]
    best: dict[float, tuple[float, ...]] = dict.fromkeys(shares, STRENGTHS)
    for repeat in range(num_repeats):
        folds = list(split_folds(labels_N, rng))
        for number, share in enumerate(shares):
            answers = {strength: np.empty(len(labels_N), dtype=np.int64) for strength in best[share]}
            for rows, held_out in folds:
                part = rows[: max(1, round(share * len(rows)))]
                sizes[number].append(len(part))
                # One thread: products this small are slower with several, the more so beside other processes.
                with threadpool_limits(1):
                    for strength, answer in answers.items():
                        answer[held_out] = predict_held_out(
                            features_NF[part], labels_N[part], features_NF[held_out], strength
                        )
            strength = max(answers, key=lambda one: (answers[one] == labels_N).mean())
            best[share], predicted_RSN[repeat, number] = (strength,), answers[strength]
    sizes_S = np.array([np.mean(of_share) for of_share in sizes])
    return Judged(sizes_S, labels_N, predicted_RSN, np.not_equal(predicted_RSN, labels_N))
