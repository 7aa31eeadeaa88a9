"""Time from an encoded image to its prediction."""

import time
from collections.abc import Sequence
from statistics import median

from tasks.model_package.classifier import ImageClassifier

WARM_UP, REPETITIONS = 3, 20


def median_milliseconds(classifiers: Sequence[ImageClassifier], image: bytes) -> list[float]:
    """Return the median time of each classifier for one image, in milliseconds.

    Each round has one image for each classifier, so that other work on the machine slows all of them.

    Args:
        classifiers: The classifiers.
        image: An encoded image.
    """
    times: list[list[float]] = [[] for _ in classifiers]
    for repetition in range(WARM_UP + REPETITIONS):
        for classifier, own in zip(classifiers, times, strict=True):
            began = time.perf_counter()
            classifier.predict([image])
            if repetition >= WARM_UP:
                own.append(1000 * (time.perf_counter() - began))
    return [median(own) for own in times]
