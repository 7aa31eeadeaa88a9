"""A registered version, loaded: its accuracy on the test split of a cache, and the time that it takes for an image."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.errors import WrongInput
from tasks.model_package.classifier import ImageClassifier
from tasks.predict.champion import translate_invalid
from tasks.refs import TEST, CacheRef, ModelRef
from tasks.storage import Storage
from tasks.text.forms import as_known
from tasks.tracking.classifier_files import fetch_registered

BATCH = 64

WARM_UP, REPETITIONS = 3, 20
"""Rounds of the measurement of a time that do not count, and that do."""


def load_registered(model: ModelRef, storage: Storage) -> ImageClassifier:
    """Load a registered version.

    Raises:
        WrongInput: Its files are not those that were registered, or are not a valid model package.
    """
    with TemporaryDirectory() as scratch:
        folder = fetch_registered(storage, model, Path(scratch))
        with translate_invalid():
            return ImageClassifier.load(folder)


def accuracy_on_cache(classifier: ImageClassifier, cache: CacheRef) -> float:
    """Return the accuracy (0-1) of a classifier on the test images of a cache.

    Classes are compared by name, in any form of Unicode.

    Raises:
        WrongInput: The classifier takes images of another size, or decodes them otherwise.
        CacheDamaged: The cache has changed or is missing.
    """
    manifest = open_cache(cache)
    if classifier.image_size != manifest.image_size:
        raise WrongInput(
            f"it takes images of {classifier.image_size} pixels and the cache's have {manifest.image_size}"
        )
    if classifier.decoding != manifest.decoding:
        raise WrongInput(
            f"it decodes images by {classifier.decoding}, and the cache's are decoded by {manifest.decoding}"
        )
    # A class of the cache that the classifier does not have is -1, which is never predicted.
    indices = {label: index for index, label in enumerate(classifier.classes)}
    form_of = as_known(indices.keys())
    expected = torch.tensor([indices.get(form_of(label), -1) for label in manifest.classes])
    loader = CacheLoader(cache.url, manifest, TEST, BATCH)
    right = 0
    with torch.inference_mode():
        for batch in loader.epoch(0):
            if len(batch.labels_B):
                predicted_B = classifier.logits(batch.inputs).argmax(1).cpu()
                right += int((predicted_B == expected[batch.labels_B]).sum())
    return right / loader.num_rows


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
