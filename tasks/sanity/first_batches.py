"""What the checks train: model, optimizer and first batches of a training, made by that training's own functions."""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import CacheLoader
from tasks.cache.manifest import open_cache
from tasks.config.train import TrainConfig
from tasks.model.device import choose_device, make_optimizer
from tasks.model.network import Classifier, build_classifier
from tasks.model.precision import choose_precision
from tasks.refs import CacheRef
from tasks.schema import TRAIN
from tasks.train.phases import Phase
from tasks.train.schedule import REFERENCE_BATCH


@dataclass(frozen=True)
class FirstBatches:
    """A classifier in training mode, its optimizer, and batches of the split `train` on its device."""

    classifier: Classifier
    optimizer: torch.optim.Optimizer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    """Images (uint8, BHWC) and labels (int64, B) of each."""

    def loss(self, batch: int) -> torch.Tensor:
        """Return the mean cross-entropy of a batch, nats, without label smoothing, whose loss never falls to 0."""
        images_BHWC, labels_B = self.batches[batch]
        if len(labels_B) == 1:  # Twice, as in training: batch norm has no variance of one value. The mean is the same.
            images_BHWC, labels_B = images_BHWC.repeat(2, 1, 1, 1), labels_B.repeat(2)
        return functional.cross_entropy(self.classifier(images_BHWC), labels_B)

    def bound_gradients(self, max_norm: float | None) -> None:
        """Scale the gradients down to `max_norm`, if there is such a bound."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.classifier.parameters(), max_norm)


def first_batches(train: TrainConfig, phase: Phase, cache: CacheRef, num_batches: int) -> FirstBatches:
    """Build what a training would, and read its first batches; as many as there are, where there are fewer.

    Args:
        train: Model, optimizer, precision, batch size and seed, as a training has them.
        phase: Which of its phases: what learns, and with what learning rate.
        cache: Where the images come from.
        num_batches: How many.

    Raises:
        WrongInput: Weights, model, layer, device or precision that cannot be.
        CacheDamaged: The cache is not what it was.
    """
    manifest = open_cache(cache)
    device = choose_device(train.device, 0)
    torch.manual_seed(train.seed)
    classifier = build_classifier(train.model, train.weights, len(manifest.classes), train.freeze_backbone).to(device)
    if phase.unfreeze_from is not None:
        classifier.unfreeze_from(phase.unfreeze_from)
    classifier.precision = choose_precision(train.precision, device, manifest.image_size)
    batch_size = REFERENCE_BATCH if train.batch_size == "auto" else train.batch_size
    loader = CacheLoader(cache.url, manifest, TRAIN, batch_size, seed=train.seed)
    # Cloned: the loader uses a batch's memory again.
    batches = [
        (batch.inputs.to(device).clone(), batch.labels_B.to(device).clone())
        for batch in islice(loader.epoch(0), num_batches)
    ]
    return FirstBatches(classifier.train(), make_optimizer(train, classifier, phase.learning_rate), batches)
