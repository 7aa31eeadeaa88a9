"""Phases of a training run: the trained layers, batches, optimizer and learning rate of each."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from tasks.cache.loader import IN_MEMORY_BYTES, CacheLoader, InMemoryLoader
from tasks.cache.manifest import CacheManifest
from tasks.config.recipe import Phase, lower_is_better, phases_of
from tasks.model.device import check_compiler, make_optimizer
from tasks.model.training_network import Classifier
from tasks.progress.activity import expect_slow_steps
from tasks.refs import TRAIN, VAL
from tasks.train.buffers import VirtualBuffers
from tasks.train.context import TrainingContext
from tasks.train.features import (
    StandardizedHead,
    ends_in_head,
    feature_statistics,
    materialize_features,
    sample_images,
)
from tasks.train.loop import LoopSettings, count_steps
from tasks.train.progress import Progress
from tasks.train.schedule import make_schedule, patient_from, peak_rate, scaling_rule, warmup_length
from tasks.train.step import StepSettings

logger = logging.getLogger("lakevision.train")

GRAPHS_PER_PHASE = 4
"""Graphs of a compiled network: of training and evaluation, each for full batches and for any size.

torch computes uncompiled beyond a limit, by default 8 (https://docs.pytorch.org/docs/stable/torch.compiler.config.html).
"""


@dataclass(frozen=True)
class Trainable:
    """Model, data and optimizer of a phase."""

    model: nn.Module
    """Whole network on images, or only its head on features."""
    loaders: dict[str, CacheLoader]
    optimizer: torch.optim.Optimizer
    loop: LoopSettings
    """Settings of its epochs; callback and average are not set."""


def prepare_phase(context: TrainingContext, phase: Phase, progress: Progress) -> Trainable:
    """Build model, loaders and optimizer of a phase."""
    train, classifier = phase.train, context.classifier
    unfreeze(classifier, phase)
    classifier.precision = context.precision
    takes_features = phase.unfreeze_from is None and trains_on_features(context)
    # The network is compiled in the first steps.
    expect_slow_steps(slow=train.compile and not takes_features)
    model: nn.Module = classifier.head if takes_features else classifier
    # Chosen once per phase: with the free memory of another process, a resumed run would have another order of images.
    batch_size = progress.batch_size = progress.batch_size or context.batch_size(model, train)
    if takes_features:
        context.features = context.features or materialize_features(context, (TRAIN, VAL))
        url, features = context.features
        loaders = {split: _feature_loader(context, url, features, split, batch_size) for split in (TRAIN, VAL)}
        if train.recipe != "given":
            context.statistics = context.statistics or feature_statistics(url, features, context.device)
            model = StandardizedHead(model, *context.statistics)
    else:
        loaders = {split: context.images(split, batch_size) for split in (TRAIN, VAL)}
        if train.compile:
            if context.device.type == "cpu":
                check_compiler()
            limit = GRAPHS_PER_PHASE * (len(phases_of(context.spec.train)) + context.spec.train.plans_fine_tuning)
            torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, limit)
            classifier.network.compile()
    return make_trainable(context, phase, progress, model, loaders)


def make_trainable(
    context: TrainingContext, phase: Phase, progress: Progress, model: nn.Module, loaders: dict[str, CacheLoader]
) -> Trainable:
    """Build optimizer and loop of a phase.

    Args:
        context: The training run.
        phase: The phase.
        progress: Its progress, which has the batch size of the loaders.
        model: Whole network on images, or only its head on features.
        loaders: This rank's shares of the splits `train` and `val`.
    """
    train, distributed, batch_size = phase.train, context.spec.distributed, loaders[TRAIN].batch_size
    takes_features = model is not context.classifier
    augment = None
    if train.augmentation.is_on and not takes_features:
        from tasks.model.augmentation import make_augment  # Here: it loads torchvision's transforms.

        augment = make_augment(train.augmentation, context.manifest.image_size, len(context.manifest.classes))
    settings = StepSettings(
        label_smoothing=train.label_smoothing,
        max_gradient_norm=train.max_gradient_norm,
        class_weights_K=context.class_weights(),
        augment=augment,
        seed=train.seed,
        accumulate_steps=train.accumulate_steps,
        sync_batch_norm=context.reducer.num_ranks > 1 and distributed is not None and distributed.sync_batch_norm,
    )
    in_fp16 = context.precision is torch.float16 and not takes_features
    progress.scaler = torch.amp.GradScaler(context.device.type) if in_fp16 else None
    if progress.scaler is not None:
        progress.scaler.scale(torch.zeros((), device=context.device))  # Now: the first batch of a rank may be empty.
    global_batch = batch_size * context.ranks.num_virtual * train.accumulate_steps
    schedule = make_schedule(
        train,
        global_batch,
        count_steps(loaders[TRAIN], settings, context.ranks),
        history=lambda: [getattr(metrics, train.monitor) for metrics in progress.history],
        first_epoch=progress.first_epoch,
    )
    warmup_epochs = warmup_length(train, global_batch)
    peak = peak_rate(train, global_batch)
    if context.reducer.rank == 0 and peak != train.learning_rate:
        logger.info(
            "learning rate %.4g: %.4g scaled (%s) from %d to %d images per step, after %g epochs of warm-up",
            *(peak, train.learning_rate, scaling_rule(train), train.reference_batch_size, global_batch, warmup_epochs),
        )
    loop = LoopSettings(
        schedule,
        context.device,
        context.reducer,
        max_epochs=train.max_epochs,
        monitor=train.monitor,
        num_classes=len(context.manifest.classes),
        patient_from=train.max_epochs if phase.whole else patient_from(train, warmup_epochs),
        breaks_ties=train.recipe != "given" and not lower_is_better(train.monitor),
        first_epoch=progress.first_epoch,
        step=settings,
        scaler=progress.scaler,
        buffers=VirtualBuffers(model, context.ranks),
    )
    return Trainable(model, loaders, make_optimizer(train, model), loop)


def unfreeze(classifier: Classifier, phase: Phase) -> None:
    """Let a classifier train the layers of a phase; a recipe keeps the statistics of batch norm in fine-tuning."""
    if phase.unfreeze_from is None:
        return
    classifier.unfreeze_from(phase.unfreeze_from)
    if phase.train.recipe != "given":
        classifier.freeze_statistics()


def trains_on_features(context: TrainingContext) -> bool:
    """Return whether the head is trained on cached features, which is determined once per training run."""
    if context.on_features is None:
        sample = sample_images(context.manifest.image_size).to(context.device)
        context.on_features = context.spec.train.makes_features and ends_in_head(context.classifier, sample)
    return context.on_features


def _feature_loader(
    context: TrainingContext, url: str, features: CacheManifest, split: str, batch_size: int
) -> CacheLoader:
    """Return this rank's loader of the features of a split: from memory if they fit, else from the cache."""
    fits_in_memory = features.splits[split].rows * features.row_bytes <= IN_MEMORY_BYTES
    return (InMemoryLoader if fits_in_memory else CacheLoader)(
        *(url, features, split, batch_size),
        seed=context.spec.train.seed if split == TRAIN else None,
        ranks=context.ranks_of(split),
        workers_count=context.spec.train.reader_threads,
        balanced_N=context.balanced(split),
    )
