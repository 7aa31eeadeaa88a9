"""Metrics of a split over all ranks: loss, confusion matrix, and what follows from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import Batch
from tasks.train.reduce import Reducer


class Loader(Protocol):
    """Batches of one split for one rank."""

    @property
    def num_steps(self) -> int:
        """Steps an epoch, the same on every rank."""

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return how many pictures all ranks together have in step `step` of those from position `start` on."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from position `start` on, `num_steps` of them from 0."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split over all ranks."""

    loss: float
    """Mean cross-entropy, nats."""
    confusion_KK: torch.Tensor
    """int64 (K, K): rows are true classes, columns predicted ones."""
    top5_accuracy: float
    """Share of pictures whose true class is among the five most probable; 1 where there are no more than five."""

    @property
    def accuracy(self) -> float:
        """Share of pictures whose most probable class is the true one."""
        return float(self.confusion_KK.diagonal().sum() / self.confusion_KK.sum())

    @property
    def class_f1(self) -> torch.Tensor:
        """F1 of each class, float64 (K,): the harmonic mean of precision and recall, 0 where nothing is right."""
        true, predicted = self.confusion_KK.sum(dim=1), self.confusion_KK.sum(dim=0)
        return 2 * self.confusion_KK.diagonal().double() / (true + predicted).clamp(min=1)

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that have pictures: each counts alike, however few it has."""
        return float(self.class_f1[self.confusion_KK.sum(dim=1) > 0].mean())


def evaluate(model: nn.Module, loader: Loader, num_classes: int, device: torch.device, reducer: Reducer) -> Evaluation:
    """Return loss, confusion matrix and top-5 accuracy over every picture of every rank, each counted once."""
    model.eval()
    confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, true class among the first five
    with torch.inference_mode():
        for batch in loader.epoch(0):
            if len(batch.labels_B):
                inputs = batch.inputs.to(device, non_blocking=True)
                labels_B = batch.labels_B.to(device, non_blocking=True)
                logits_BK = model(inputs)
                loss = functional.cross_entropy(logits_BK, labels_B, reduction="sum")
                first = logits_BK.topk(min(5, num_classes), dim=1).indices
                totals += torch.stack([loss.double(), (first == labels_B[:, None]).sum().double()])
                cells = labels_B * num_classes + logits_BK.argmax(1)
                confusion += torch.bincount(cells, minlength=num_classes * num_classes).double()
    # Sums of all ranks, never a rank's own figures: every rank sees the same and decides the same.
    summed = reducer.sum(torch.cat([totals, confusion]).cpu())
    matrix_KK = summed[2:].long().view(num_classes, num_classes)
    loss_mean, top5 = (summed[:2] / matrix_KK.sum()).tolist()
    return Evaluation(loss=loss_mean, confusion_KK=matrix_KK, top5_accuracy=top5)
