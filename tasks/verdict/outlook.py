"""The verdict from held-out answers: accuracy, what more images are worth, and the classes that are confused."""

from collections.abc import Sequence

import numpy as np

from tasks.interval import wilson_interval
from tasks.progress.count import format_seconds
from tasks.refs import ClassOutlook, ConfusedPair, Verdict
from tasks.text.markup import printable
from tasks.verdict.curve import INTERVAL, Curves, Values, draw_errors, expected_accuracy, fit_curves
from tasks.verdict.probe import Judged

NUM_WEAKEST, NUM_CONFUSED = 5, 8
"""Maximum numbers of classes and of pairs in a verdict."""

SHRINKAGE = 10.0
"""Images of a class whose own errors weigh as much as those of all classes."""

WIDE = 0.3
"""Width of an interval from which the verdict says that the images are too few."""


def class_outlooks(
    judged: Judged, errors_DS: Values, classes: Sequence[str], num_trained: int, rng: np.random.Generator
) -> tuple[ClassOutlook, ...]:
    """Return the classes with the highest errors, and what twice the images are worth to each.

    A class has a curve of its own. Its errors are shrunken to those of all classes, the more the fewer its images are.

    Args:
        judged: The answers about held-out images.
        errors_DS: Draws of the error over all classes.
        classes: Class names by index.
        num_trained: Images that the head will be trained on.
        rng: Generator of the curves.
    """
    counts_K = np.bincount(judged.labels_N, minlength=len(classes))
    wrong_N = judged.wrong_RSN[:, -1].mean(axis=0)
    wrong_K = np.bincount(judged.labels_N, wrong_N, minlength=len(classes))
    shrunken_K = (wrong_K + SHRINKAGE * wrong_N.mean()) / (counts_K + SHRINKAGE)
    weakest = [index for index in np.argsort(-shrunken_K, kind="stable") if counts_K[index]][:NUM_WEAKEST]
    found = []
    for index in weakest:
        own_DS = draw_errors(judged.wrong_RSN[:, :, judged.labels_N == index], rng)
        share = counts_K[index] / (counts_K[index] + SHRINKAGE)
        curves = fit_curves(judged.sizes_S, share * own_DS + (1 - share) * errors_DS, rng)
        now_D, then_D = curves.at(num_trained), curves.at(2 * num_trained)
        low, gain, high = np.quantile(now_D - then_D, INTERVAL).tolist()
        found.append(
            ClassOutlook(
                name=printable(classes[index]),
                images=max(1, round(counts_K[index] / len(judged.labels_N) * num_trained)),
                accuracy=float(1 - np.median(now_D)),
                gain=(gain, low, high),
            )
        )
    return tuple(found)


def confused_pairs(judged: Judged, classes: Sequence[str]) -> tuple[ConfusedPair, ...]:
    """Return the most frequent confusions on held-out images, after training on the largest share."""
    num_repeats = len(judged.predicted_RSN)
    counts_KK = np.zeros((len(classes), len(classes)))
    for predicted_N in judged.predicted_RSN[:, -1]:
        np.add.at(counts_KK, (judged.labels_N, predicted_N), 1 / num_repeats)
    np.fill_diagonal(counts_KK, 0.0)
    found = []
    for place in np.argsort(-counts_KK, axis=None, kind="stable")[:NUM_CONFUSED].tolist():
        true, predicted = divmod(place, len(classes))
        if wrong := round(float(counts_KK[true, predicted]), 2):
            names = {"true": printable(classes[true]), "predicted": printable(classes[predicted])}
            images = int((judged.labels_N == true).sum())
            share = (wrong / images, *wilson_interval(wrong, images))
            found.append(ConfusedPair(**names, wrong=wrong, images=images, share=share))
    return tuple(found)


def make_verdict(
    judged: Judged, classes: Sequence[str], num_trained: int, num_tested: int, speed: float | None, seed: int
) -> tuple[Verdict, Curves]:
    """Return the verdict of a training run, and the curves that it is drawn from.

    Args:
        judged: The answers about held-out images.
        classes: Class names by index.
        num_trained: Images that the head will be trained on.
        num_tested: Images that it will be tested on.
        speed: Speed of training all layers, in images per second, if it is known.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    errors_DS = draw_errors(judged.wrong_RSN, rng)
    curves = fit_curves(judged.sizes_S, errors_DS, rng)
    low, accuracy, high = expected_accuracy(curves.at(num_trained), num_tested, rng)
    worth = float(np.median(curves.at(num_trained) - curves.at(2 * num_trained)))
    line = f"expected test accuracy {low:.2f} to {high:.2f} (about {accuracy:.3f}) with a frozen backbone"
    if high - low > WIDE:
        line += f"; {len(judged.labels_N)} images of {len(set(judged.labels_N))} classes say no more than that"
    line += f"; twice the images are worth about {100 * worth:.1f} points"
    if speed:
        line += f"; an epoch of fine-tuning all layers takes about {format_seconds(num_trained / speed)} here"
    measured_S = judged.wrong_RSN.mean(axis=(0, 2))
    verdict = Verdict(
        line=line,
        accuracy=accuracy,
        interval=(low, high),
        worth_of_doubling=worth,
        curve=tuple((round(images), 1.0 - error) for images, error in zip(judged.sizes_S, measured_S, strict=True)),
        weakest=class_outlooks(judged, errors_DS, classes, num_trained, rng),
        confused=confused_pairs(judged, classes),
        fine_tuning_images_per_second=speed,
    )
    return verdict, curves
