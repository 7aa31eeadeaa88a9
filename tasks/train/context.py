"""The context of a training run on one rank: its data, model and ranks, which all phases share."""

import itertools
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import nn

from tasks.cache.loader import CacheLoader, read_labels
from tasks.cache.manifest import CacheManifest
from tasks.cache.order import VirtualRanks
from tasks.collectives.reducer import Reducer, gather_numbers
from tasks.config.recipe import PhaseTrain
from tasks.environment import local_rank_and_size
from tasks.errors import join_names
from tasks.model.precision import OPTIMIZER_COPIES, choose_precision, largest_batch
from tasks.model.training_network import Classifier
from tasks.refs import SPLITS, TEST, TRAIN, VAL
from tasks.train.batches import check_data
from tasks.train.spec import TrainingSpec

logger = logging.getLogger("lakevision.train")


MAX_RATIO = 10
"""Ratio of the largest to the smallest class above which a training run says how to balance them."""


@dataclass
class TrainingContext:
    """State shared by the phases of a training run, on one rank."""

    spec: TrainingSpec
    manifest: CacheManifest
    classifier: Classifier
    device: torch.device
    reducer: Reducer
    on_features: bool | None = None
    """Whether the head is trained on cached features (`trains_on_features`); None until it was determined."""
    features: tuple[str, CacheManifest] | None = None
    """URL and manifest of the cached features of `train` and `val`, once a phase has computed or found them."""
    statistics: tuple[torch.Tensor, torch.Tensor] | None = None
    """Mean and standard deviation of these features, float32 (F,), once a phase has needed them."""

    @cached_property
    def precision(self) -> torch.dtype | None:
        """Number format of the network's computations; None is that of its weights."""
        return choose_precision(self.spec.train.precision, self.device, self.manifest.image_size)

    def agree_on_precision(self) -> None:
        """Compute in what the processors of all ranks have, where they differ; a collective operation."""
        numbers = gather_numbers(self.reducer, {None: 0, torch.bfloat16: 1, torch.float16: 2}[self.precision])
        if (numbers != numbers[0]).any():
            self.precision = None

    @cached_property
    def ranks(self) -> VirtualRanks:
        """The virtual ranks of the split `train`, as many as the ranks that the run is configured for."""
        own = self.reducer
        return VirtualRanks.of(own.rank, own.num_ranks, max(self.spec.num_virtual_ranks, own.num_ranks))

    def ranks_of(self, split: str) -> VirtualRanks:
        """Return the virtual ranks of a split; those of `train` decide the result, others need no virtual ranks."""
        return self.ranks if split == TRAIN else VirtualRanks.of(self.reducer.rank, self.reducer.num_ranks)

    @cached_property
    def _labels(self) -> dict[str, np.ndarray]:  # int64 (N,)
        return {split: read_labels(self.spec.cache.url, self.manifest, split) for split in SPLITS}

    @cached_property
    def counts(self) -> dict[str, np.ndarray]:  # int64 (K,)
        """Images of each class by split."""
        num_classes = len(self.manifest.classes)
        return {split: np.bincount(labels_N, minlength=num_classes) for split, labels_N in self._labels.items()}

    def balanced(self, split: str) -> np.ndarray | None:  # int64 (N,)
        """Return the labels for `CacheLoader` where the classes of the split are equally often in an epoch."""
        return self._labels[split] if split == TRAIN and self.spec.train.sampling == "balanced" else None

    def images(self, split: str, batch_size: int) -> CacheLoader:
        """Return this rank's loader of the images of a split; `train` is shuffled."""
        seed = self.spec.train.seed if split == TRAIN else None
        return CacheLoader(
            self.spec.cache.url,
            self.manifest,
            split,
            batch_size,
            seed=seed,
            ranks=self.ranks_of(split),
            workers_count=self.spec.train.reader_threads,
            pin_memory=self.device.type == "cuda",
            balanced_N=self.balanced(split),
        )

    def check(self) -> None:
        """Check the data, and log a lowered batch size, and a warning for classes without training images.

        Raises:
            WrongInput: As for `check_data`.
        """
        check_data(self.spec.train, self.manifest, self.ranks.num_virtual)
        if self.reducer.rank != 0:
            return
        if self.fitting_batch != self.spec.train.batch_size:
            logger.warning(
                "train.batch_size is %s, lowered to %s: the split 'train' has %d images",
                *(self.spec.train.batch_size, self.fitting_batch, self.manifest.splits[TRAIN].rows),
            )
        found = self.counts[TRAIN][self.counts[TRAIN] > 0]
        is_natural = self.spec.train.sampling == "natural" and self.spec.train.class_weights == "none"
        if is_natural and len(found) and found.max() > MAX_RATIO * found.min():
            logger.warning(
                "the classes of the split 'train' have %d to %d images, and training favours the large ones; "
                "train.sampling or train.class_weights balanced gives all the same weight",
                *(found.min(), found.max()),
            )
        for split in (VAL, TEST):
            is_untrained = (self.counts[split] > 0) & (self.counts[TRAIN] == 0)
            untrained = list(itertools.compress(self.manifest.classes, is_untrained))
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

    @property
    def fitting_batch(self) -> int | Literal["auto"]:
        """`train.batch_size`, lowered where the split `train` has fewer images than a step of all ranks takes."""
        return self.spec.train.fitting_batch(self.ranks.num_virtual, self.manifest.splits[TRAIN].rows)

    def batch_size(self, model: nn.Module, train: PhaseTrain) -> int:
        """Return the images per step on each rank in a phase, the same on all ranks."""
        if self.fitting_batch != "auto":
            return self.fitting_batch
        own = largest_batch(
            model,
            self._example(model),
            self.manifest.splits[TRAIN].rows // self.spec.train.accumulate_steps,
            self.ranks.num_virtual,
            self.device,
            num_local=(local_rank_and_size() or (0, self.reducer.num_ranks))[1],
            copies=OPTIMIZER_COPIES
            + bool(train.ema_decay)
            + (self.reducer.num_ranks > 1)  # The buckets in which gradients are sent.
            + (self.spec.train.accumulate_steps > 1),  # Gradients are kept while the next batch is computed.
        )
        smallest = int(gather_numbers(self.reducer, own).min())  # Another rank may have less free memory.
        if self.reducer.rank == 0 and smallest < own:
            logger.info("train.batch_size auto: %d images per step, as many as fit on every rank", smallest)
        return smallest

    def _example(self, model: nn.Module) -> torch.Tensor:
        """Return a zero input of the model for one image: pixels, or features."""
        if isinstance(model, Classifier):
            return torch.zeros(self.manifest.image_size, self.manifest.image_size, 3, dtype=torch.uint8)
        assert isinstance(model, nn.Linear), "a model on features is a linear head"
        return torch.zeros(model.in_features)
