"""The accuracy of a registered model on the split `test` of a cache, measured as inference computes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.errors import WrongInput
from tasks.predict.champion import fetch_classifier
from tasks.predict.model import ImageClassifier
from tasks.refs import CacheRef, ModelRef
from tasks.schema import TEST
from tasks.storage import Storage

BATCH = 64


def accuracy_on_cache(model: ModelRef, cache: CacheRef, storage: Storage) -> float:
    """Return the share of test images (0-1) that a registered version gets right; classes are compared by name.

    Raises:
        WrongInput: The version is refused, or takes images of another size than the cache's.
        CacheDamaged: The cache is not what it was, or is gone.
    """
    manifest = open_cache(cache)
    with TemporaryDirectory() as scratch:
        classifier = ImageClassifier.load(fetch_classifier(storage, model, Path(scratch)))
    if classifier.image_size != manifest.image_size:
        raise WrongInput(
            f"it takes images of {classifier.image_size} pixels and the cache's have {manifest.image_size}"
        )
    # A class that only the table has is -1: no prediction is it.
    ours = {label: index for index, label in enumerate(classifier.classes)}
    there = torch.tensor([ours.get(label, -1) for label in manifest.classes])
    loader = CacheLoader(cache.url, manifest, TEST, BATCH, pin_memory=False)
    right = 0
    with torch.inference_mode():
        for batch in loader.epoch(0):
            if len(batch.labels_B):
                predicted_B = classifier.logits(batch.inputs).argmax(1).cpu()
                right += int((predicted_B == there[batch.labels_B]).sum())
    return right / loader.num_rows
