"""Model, optimizer and first batches for the sanity checks, built by the functions of training."""

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


@dataclass(frozen=True)
class FirstBatches:
    """A classifier in training mode, its optimizer, and batches of the split `train` on its device."""

    classifier: Classifier
    optimizer: torch.optim.Optimizer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    """Images (uint8, BHWC) and labels (int64, B) per batch."""

    def loss(self, batch: int) -> torch.Tensor:
        """Return the mean cross-entropy of a batch in nats, without label smoothing, whose loss never reaches 0."""
        images_BHWC, labels_B = self.batches[batch]
        if len(labels_B) == 1:  # Repeated, as in training: batch norm needs more than one value. The mean is the same.
            images_BHWC, labels_B = images_BHWC.repeat(2, 1, 1, 1), labels_B.repeat(2)
        return functional.cross_entropy(self.classifier(images_BHWC), labels_B)

    def clip_gradients(self, max_norm: float | None) -> None:
        """Clip the gradients' norm to `max_norm`, unless it is None."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.classifier.parameters(), max_norm)


def first_batches(train: TrainConfig, phase: Phase, cache: CacheRef, num_batches: int) -> FirstBatches:
    """Build model and optimizer as training does, and read the first batches of epoch 0.

    Args:
        train: Model, optimizer, precision, batch size and seed of the training run.
        phase: Phase of the training run, which sets the trained layers and the learning rate.
        cache: Cache of the images.
        num_batches: Number of batches at most; fewer if the split has fewer.

    Raises:
        WrongInput: Invalid weights, model, layer, device or precision.
        CacheDamaged: The cache was changed or removed.
    """
    manifest = open_cache(cache)
    device = choose_device(train.device, 0)
    torch.manual_seed(train.seed)
    classifier = build_classifier(train.model, train.weights, len(manifest.classes), train.freeze_backbone).to(device)
    if phase.unfreeze_from is not None:
        classifier.unfreeze_from(phase.unfreeze_from)
    classifier.precision = choose_precision(train.precision, device, manifest.image_size)
    batch_size = train.reference_batch_size if train.batch_size == "auto" else train.batch_size
    loader = CacheLoader(cache.url, manifest, TRAIN, batch_size, seed=train.seed)
    # Cloned: the loader reuses a batch's memory.
    batches = [
        (batch.inputs.to(device).clone(), batch.labels_B.to(device).clone())
        for batch in islice(loader.epoch(0), num_batches)
    ]
    return FirstBatches(classifier.train(), make_optimizer(train, classifier, phase.learning_rate), batches)
