"""Phases of a training run: the trained layers, batches, optimizer and learning rate of each."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from tasks.cache.loader import CacheLoader, count_labels
from tasks.cache.manifest import CacheManifest
from tasks.cache.order import VirtualRanks
from tasks.collectives.reducer import Reducer
from tasks.config.train import TrainConfig
from tasks.environment import local_rank_and_size
from tasks.errors import join_names
from tasks.model.augmentation import make_augment
from tasks.model.device import check_compiler, make_optimizer
from tasks.model.precision import OPTIMIZER_COPIES, choose_precision, largest_batch
from tasks.model.training_network import Classifier
from tasks.progress.activity import expect_slow_steps
from tasks.refs import SPLITS, TEST, TRAIN, VAL
from tasks.train.batches import check_data
from tasks.train.buffers import VirtualBuffers
from tasks.train.features import ends_in_head, feature_loader, materialize_features, sample_images
from tasks.train.loop import count_steps
from tasks.train.progress import Progress
from tasks.train.schedule import make_schedule, peak_rate, scaling_rule, warmup_length
from tasks.train.spec import TrainingSpec
from tasks.train.step import StepSettings

logger = logging.getLogger("lakevision.train")

GRAPHS_PER_PHASE = 4
"""Graphs of a compiled network: of training and evaluation, each for full batches and for any size.

torch computes uncompiled beyond a limit, by default 8 (https://docs.pytorch.org/docs/stable/torch.compiler.config.html).
"""


@dataclass(frozen=True)
class Phase:
    """Settings of a phase."""

    number: int
    unfreeze_from: str | None
    """First trained layer; None: only the head, or all layers if the backbone is not frozen."""
    learning_rate: float
    max_epochs: int


def phases_of(train: TrainConfig) -> list[Phase]:
    """Return the phases in order."""
    first = Phase(0, None, train.learning_rate, train.max_epochs)
    return [first] + [
        Phase(number, phase.unfreeze_from, phase.learning_rate, phase.max_epochs)
        for number, phase in enumerate(train.fine_tune, 1)
    ]


@dataclass
class TrainingContext:
    """State shared by the phases of a training run, on one rank."""

    spec: TrainingSpec
    manifest: CacheManifest
    classifier: Classifier
    device: torch.device
    reducer: Reducer

    @cached_property
    def precision(self) -> torch.dtype | None:
        """Number format of the network's computations; None is that of its weights."""
        return choose_precision(self.spec.train.precision, self.device, self.manifest.image_size)

    @cached_property
    def ranks(self) -> VirtualRanks:
        """The virtual ranks of the split `train`, as many as the ranks that the run is configured for."""
        own = self.reducer
        return VirtualRanks.of(own.rank, own.num_ranks, max(self.spec.num_virtual_ranks, own.num_ranks))

    def ranks_of(self, split: str) -> VirtualRanks:
        """Return the virtual ranks of a split; those of `train` decide the result, others need no virtual ranks."""
        return self.ranks if split == TRAIN else VirtualRanks.of(self.reducer.rank, self.reducer.num_ranks)

    @cached_property
    def counts(self) -> dict[str, np.ndarray]:  # type: ignore[type-arg]  # int64 (K,)
        """Images of each class by split."""
        return {split: count_labels(self.spec.cache.url, self.manifest, split) for split in SPLITS}

    @property
    def syncs_batch_norm(self) -> bool:
        """True if batch norms take the statistics of the batches of all ranks."""
        distributed = self.spec.distributed
        return self.reducer.num_ranks > 1 and distributed is not None and distributed.sync_batch_norm

    def images(self, split: str, batch_size: int) -> CacheLoader:
        """Return this rank's loader of the images of a split; `train` is shuffled."""
        seed = self.spec.train.seed if split == TRAIN else None
        ranks = self.ranks_of(split)
        return CacheLoader(self.spec.cache.url, self.manifest, split, batch_size, seed=seed, ranks=ranks)

    def check(self) -> None:
        """Check the data, and log a warning for classes without training images.

        Raises:
            WrongInput: As for `check_data`.
        """
        check_data(self.spec.train, self.manifest, self.ranks.num_virtual)
        if self.reducer.rank != 0:
            return
        for split in (VAL, TEST):
            untrained = [
                name
                for name, num_images, num_trained in zip(
                    self.manifest.classes, self.counts[split], self.counts[TRAIN], strict=True
                )
                if num_images and not num_trained
            ]
            if untrained:
                logger.warning(
                    "the split 'train' has no image of %s, so those in '%s' cannot be recognised: add some",
                    join_names(untrained[:5], len(untrained)),
                    split,
                )

    def class_weights(self) -> torch.Tensor | None:
        """Return the class weights of the loss, float32 (K,), or None for equal weights.

        balanced: n / (K n_k) over the classes with images, so that the mean weight of the images is 1 (King and Zeng,
        "Logistic Regression in Rare Events Data", 2001, section 4.2).
        """
        if self.spec.train.class_weights == "none":
            return None
        counts = torch.from_numpy(self.counts[TRAIN]).double()
        weights = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))
        return (weights * (counts > 0)).float().to(self.device)

    def batch_size(self, model: nn.Module) -> int:
        """Return the images per step on each rank, the same on all ranks."""
        if self.spec.train.batch_size != "auto":
            return self.spec.train.batch_size
        own = largest_batch(
            model,
            self._example(model),
            self.manifest.splits[TRAIN].rows // self.spec.train.accumulate_steps,
            self.ranks.num_virtual,
            self.device,
            num_local=(local_rank_and_size() or (0, self.reducer.num_ranks))[1],
            copies=OPTIMIZER_COPIES + (self.spec.train.ema_decay is not None),
        )
        fits = torch.zeros(self.reducer.num_ranks, dtype=torch.int64)
        fits[self.reducer.rank] = own
        smallest = int(self.reducer.sum(fits).min())  # Another rank may have less free memory.
        if self.reducer.rank == 0 and smallest < own:
            logger.info("train.batch_size auto: %d images per step, as many as fit on every rank", smallest)
        return smallest

    def _example(self, model: nn.Module) -> torch.Tensor:
        """Return a zero input of the model for one image: pixels, or features."""
        if isinstance(model, Classifier):
            return torch.zeros(self.manifest.image_size, self.manifest.image_size, 3, dtype=torch.uint8)
        assert isinstance(model, nn.Linear), "a model on features is a linear head"
        return torch.zeros(model.in_features)


@dataclass(frozen=True)
class Trainable:
    """Model, data and optimizer of a phase."""

    model: nn.Module
    """Whole network on images, or only its head on features."""
    loaders: dict[str, CacheLoader]
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    """Maps a step, counted over all phases, to its learning rate."""
    warmup_epochs: float
    settings: StepSettings
    buffers: VirtualBuffers


def prepare_phase(context: TrainingContext, phase: Phase, progress: Progress) -> Trainable:
    """Build model, loaders and optimizer of a phase; the optimizer is not yet wrapped by the reducer."""
    train, classifier = context.spec.train, context.classifier
    if phase.unfreeze_from is not None:
        classifier.unfreeze_from(phase.unfreeze_from)
    classifier.precision = context.precision
    takes_features = _takes_features(context, phase)
    # The network is compiled in the first steps.
    expect_slow_steps(slow=train.compile and not takes_features)
    model = classifier.head if takes_features else classifier
    # Chosen once per phase: with the free memory of another process, a resumed run would have another order of images.
    batch_size = progress.batch_size = progress.batch_size or context.batch_size(model)
    if takes_features:
        loaders = _feature_loaders(context, batch_size)
    else:
        loaders = {split: context.images(split, batch_size) for split in (TRAIN, VAL)}
        if train.compile:
            if context.device.type == "cpu":
                check_compiler()
            limit = GRAPHS_PER_PHASE * len(phases_of(train))
            torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, limit)
            classifier.network.compile()
    settings = StepSettings(
        label_smoothing=train.label_smoothing,
        max_gradient_norm=train.max_gradient_norm,
        class_weights_K=context.class_weights(),
        augment=make_augment(train.augmentation, context.manifest.image_size, len(context.manifest.classes)),
        seed=train.seed,
        accumulate_steps=train.accumulate_steps,
        sync_batch_norm=context.syncs_batch_norm,
    )
    global_batch = batch_size * context.ranks.num_virtual * train.accumulate_steps
    schedule = make_schedule(
        train,
        global_batch,
        count_steps(loaders[TRAIN], settings, context.ranks),
        base=phase.learning_rate,
        max_epochs=phase.max_epochs,
        history=lambda: [getattr(metrics, train.monitor) for metrics in progress.history],
        first_epoch=progress.first_epoch,
    )
    warmup_epochs = warmup_length(train, global_batch, phase.max_epochs)
    if (
        context.reducer.rank == 0
        and (peak := peak_rate(train, phase.learning_rate, global_batch)) != phase.learning_rate
    ):
        logger.info(
            "learning rate %.4g: %.4g scaled (%s) from %d to %d images per step, after %g epochs of warm-up",
            *(peak, phase.learning_rate, scaling_rule(train), train.reference_batch_size, global_batch, warmup_epochs),
        )
    optimizer = make_optimizer(train, model, phase.learning_rate)
    buffers = VirtualBuffers(model, context.ranks)
    return Trainable(model, loaders, optimizer, schedule, warmup_epochs, settings, buffers)


def _takes_features(context: TrainingContext, phase: Phase) -> bool:
    if phase.unfreeze_from is not None or not context.spec.train.makes_features:
        return False
    return ends_in_head(context.classifier, sample_images(context.manifest.image_size).to(context.device))


def _feature_loaders(context: TrainingContext, batch_size: int) -> dict[str, CacheLoader]:
    url, features = materialize_features(
        context.spec.train.model,
        context.classifier,
        context.spec.cache,
        context.manifest,
        (TRAIN, VAL),
        context.spec.storage.cache,
        context.device,
        context.precision,
        context.reducer,
    )
    return {
        split: feature_loader(
            url,
            features,
            split,
            batch_size,
            seed=context.spec.train.seed if split == TRAIN else None,
            ranks=context.ranks_of(split),
        )
        for split in (TRAIN, VAL)
    }
