"""Metrics of a split over all ranks: loss, confusion matrix, and what follows from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import Batch
from tasks.collectives import Reducer
from tasks.metrics.calibration import Calibration, CalibrationSums
from tasks.metrics.mistakes import Mistake, WorstMistakes


class Loader(Protocol):
    """Batches of one split for one rank."""

    @property
    def num_steps(self) -> int:
        """Steps an epoch, the same on every rank."""

    def num_global_rows(self, step: int, start: int = 0) -> int:
        """Return how many images all ranks together have in step `step` of those from position `start` on."""

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
    """Share of images whose true class is among the five most probable; 1 where there are no more than five."""

    @property
    def accuracy(self) -> float:
        """Share of images whose most probable class is the true one."""
        return float(self.confusion_KK.diagonal().sum() / self.confusion_KK.sum())

    @property
    def class_f1(self) -> torch.Tensor:
        """F1 of each class, float64 (K,): the harmonic mean of precision and recall, 0 where nothing is right."""
        true, predicted = self.confusion_KK.sum(dim=1), self.confusion_KK.sum(dim=0)
        return 2 * self.confusion_KK.diagonal().double() / (true + predicted).clamp(min=1)

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that have images: each counts alike, however few it has."""
        return float(self.class_f1[self.confusion_KK.sum(dim=1) > 0].mean())


@dataclass(frozen=True)
class DetailedEvaluation(Evaluation):
    """Metrics of one split over all ranks, and what a person wants to know beside them once a training is over."""

    calibration: Calibration
    mistakes: tuple[Mistake, ...]
    """The worst, by their loss; empty where every image was classified rightly."""


class _Sums:
    """Collects loss, confusion matrix and top-5 hits of a rank."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._num_classes = num_classes
        self._confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, true class among the first five

    def add(self, labels_B: torch.Tensor, logits_BK: torch.Tensor) -> None:
        """Take in a batch."""
        num_classes = self._num_classes
        loss = functional.cross_entropy(logits_BK, labels_B, reduction="sum")
        first = logits_BK.topk(min(5, num_classes), dim=1).indices
        self._totals += torch.stack([loss.double(), (first == labels_B[:, None]).sum().double()])
        cells = labels_B * num_classes + logits_BK.argmax(1)
        # In place: of many classes a matrix for each batch would be most of what an evaluation takes.
        self._confusion.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))

    def reduce(self, reducer: Reducer) -> Evaluation:
        """Return the metrics over all ranks, all of which call this."""
        # Sums of all ranks, never a rank's own figures: every rank sees the same and decides the same.
        summed = reducer.sum(torch.cat([self._totals, self._confusion]).cpu())
        matrix_KK = summed[2:].long().view(self._num_classes, self._num_classes)
        loss_mean, top5 = (summed[:2] / matrix_KK.sum()).tolist()
        return Evaluation(loss=loss_mean, confusion_KK=matrix_KK, top5_accuracy=top5)


def _logits(
    model: nn.Module, loader: Loader, device: torch.device
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
    """Yield every batch that has images, with its labels (B,) and logits (B, K) on the device."""
    model.eval()
    for batch in loader.epoch(0):
        if len(batch.labels_B):
            inputs = batch.inputs.to(device, non_blocking=True)
            labels_B = batch.labels_B.to(device, non_blocking=True)
            yield batch, labels_B, model(inputs)


def evaluate(model: nn.Module, loader: Loader, num_classes: int, device: torch.device, reducer: Reducer) -> Evaluation:
    """Return loss, confusion matrix and top-5 accuracy over every image of every rank, each counted once."""
    sums = _Sums(num_classes, device)
    with torch.inference_mode():
        for _batch, labels_B, logits_BK in _logits(model, loader, device):
            sums.add(labels_B, logits_BK)
    return sums.reduce(reducer)


def evaluate_in_detail(
    model: nn.Module, loader: Loader, num_classes: int, device: torch.device, reducer: Reducer
) -> DetailedEvaluation:
    """Return what `evaluate` does, the calibration and the worst mistakes: for the end, it waits for every batch."""
    sums, calibration, mistakes = _Sums(num_classes, device), CalibrationSums(device), WorstMistakes()
    with torch.inference_mode():
        for batch, labels_B, logits_BK in _logits(model, loader, device):
            sums.add(labels_B, logits_BK)
            log_probabilities_BK = functional.log_softmax(logits_BK.double(), dim=1)
            # The same argmax as in the confusion matrix: of equal logits both take the same one.
            predicted_B = logits_BK.argmax(1)
            confidence_B = log_probabilities_BK.gather(1, predicted_B[:, None])[:, 0].exp()
            calibration.add(confidence_B, predicted_B == labels_B)
            mistakes.add(torch.from_numpy(batch.rows_B).to(device), labels_B, predicted_B, log_probabilities_BK)
    plain = sums.reduce(reducer)
    return DetailedEvaluation(
        plain.loss,
        plain.confusion_KK,
        plain.top5_accuracy,
        calibration=calibration.reduce(reducer),
        mistakes=mistakes.reduce(reducer),
    )
