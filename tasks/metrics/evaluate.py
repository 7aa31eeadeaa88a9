"""Metrics of a split over all ranks: loss, confusion matrix and what derives from it; two precisions compared."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tasks.cache.loader import Batch, CacheLoader
from tasks.collectives.reducer import Reducer, gather_numbers
from tasks.metrics.calibration import Calibration, CalibrationSums, Scores, ScoreSums
from tasks.metrics.mistakes import Mistake, WorstMistakes
from tasks.progress.activity import stepping


@dataclass(frozen=True)
class EpochMetrics:
    """Metrics of one epoch over all ranks."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    val_top5_accuracy: float
    val_macro_f1: float
    learning_rate: float
    gradient_norm: float
    """Mean gradient norm over the steps, before clipping."""
    images_per_second: float
    data_wait_share: float
    """Fraction of rank 0's training time spent waiting for batches."""
    train_seconds: float
    validation_seconds: float
    val_calibrated_loss: float = math.nan
    """Loss at the temperature of CALIBRATED that fits best; NaN in checkpoints of release 0.1.0."""

    def values(self) -> dict[str, float]:
        """Return the metrics by name, without the number of the epoch and values that are NaN."""
        return {name: float(own) for name, own in vars(self).items() if name != "epoch" and not math.isnan(own)}


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split over all ranks."""

    loss: float
    """Mean cross-entropy in nats."""
    confusion_KK: torch.Tensor
    """Confusion matrix, int64 (K, K): rows are true classes, columns are predicted classes."""
    top5_accuracy: float
    """Fraction of images whose true class is among the five most probable; 1 with five classes or fewer."""
    calibrated_loss: float
    """Mean cross-entropy in nats at the inverse temperature of CALIBRATED where it is lowest."""

    @property
    def accuracy(self) -> float:
        """Fraction of images whose most probable class is the true class."""
        return float(self.confusion_KK.diagonal().sum() / self.confusion_KK.sum())

    @property
    def class_f1(self) -> torch.Tensor:
        """F1 score per class, float64 (K,): the harmonic mean of precision and recall, 0 without true positives."""
        true, predicted = self.confusion_KK.sum(dim=1), self.confusion_KK.sum(dim=0)
        return 2 * self.confusion_KK.diagonal().double() / (true + predicted).clamp(min=1)

    @property
    def macro_f1(self) -> float:
        """Unweighted mean of the F1 scores of the classes that have images."""
        return float(self.class_f1[self.confusion_KK.sum(dim=1) > 0].mean())


@dataclass(frozen=True)
class DetailedEvaluation(Evaluation):
    """Metrics of one split over all ranks, with calibration and worst mistakes for the final report."""

    calibration: Calibration
    uncalibrated: Calibration
    """Calibration at the temperature 1."""
    scores: Scores
    """Images by their score of `unknown_scores`."""
    mistakes: tuple[Mistake, ...]
    """Mistakes with the highest loss, in descending order; empty if every image was classified correctly."""


CALIBRATED = tuple(1.25**power for power in range(-7, 8))
"""Inverse temperatures of the calibrated loss, from 0.2 to 5. Training with label smoothing or an average of weights
gives other confidences, which the temperature of the model package corrects, and which must not decide."""


class _Sums:
    """Accumulator of a rank's loss, confusion matrix and top-5 hits."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._num_classes = num_classes
        self._confusion = torch.zeros(num_classes * num_classes, dtype=torch.float64, device=device)
        self._totals = torch.zeros(2 + len(CALIBRATED), dtype=torch.float64, device=device)  # loss, top-5 hits, losses

    def add(self, labels_B: torch.Tensor, logits_BK: torch.Tensor) -> None:
        """Add a batch."""
        num_classes = self._num_classes
        loss = functional.cross_entropy(logits_BK, labels_B, reduction="sum")
        top5 = logits_BK.topk(min(5, num_classes), dim=1).indices
        losses = [functional.cross_entropy(logits_BK * inverse, labels_B, reduction="sum") for inverse in CALIBRATED]
        hits = (top5 == labels_B[:, None]).sum()
        self._totals += torch.stack([value.double() for value in (loss, hits, *losses)])
        cells = labels_B * num_classes + logits_BK.argmax(1)
        # In place: with many classes, a new matrix per batch would take most of the time of an evaluation.
        self._confusion.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))

    def reduce(self, reducer: Reducer) -> Evaluation:
        """Return the metrics over all ranks; a collective operation."""
        # Sums over all ranks, never a rank's own metrics: every rank sees the same values and takes the same decisions.
        summed = reducer.sum(torch.cat([self._totals, self._confusion]).cpu())
        num_totals = len(self._totals)
        matrix_KK = summed[num_totals:].long().view(self._num_classes, self._num_classes)
        loss_mean, top5, *losses = (summed[:num_totals] / matrix_KK.sum()).tolist()
        return Evaluation(
            loss=loss_mean, confusion_KK=matrix_KK, top5_accuracy=top5, calibrated_loss=min(losses, default=math.nan)
        )


def logits_of(
    model: nn.Module, loader: CacheLoader, device: torch.device
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
    """Yield every non-empty batch, with its labels (B,) and logits (B, K) on the device."""
    model.eval()
    with stepping("evaluating") as begin_step:
        for step, batch in enumerate(loader.epoch(0)):
            begin_step(step)
            if len(batch.labels_B):
                inputs = batch.inputs.to(device, non_blocking=True)
                labels_B = batch.labels_B.to(device, non_blocking=True)
                yield batch, labels_B, model(inputs)


def evaluate(
    model: nn.Module, loader: CacheLoader, num_classes: int, device: torch.device, reducer: Reducer
) -> Evaluation:
    """Return loss, confusion matrix and top-5 accuracy over the images of all ranks, each counted once."""
    sums = _Sums(num_classes, device)
    with torch.inference_mode():
        for _batch, labels_B, logits_BK in logits_of(model, loader, device):
            sums.add(labels_B, logits_BK)
    return sums.reduce(reducer)


def evaluate_in_detail(
    model: nn.Module,
    loader: CacheLoader,
    num_classes: int,
    device: torch.device,
    reducer: Reducer,
    temperature: float = 1.0,
) -> DetailedEvaluation:
    """Return the metrics of `evaluate`, the calibration, the scores and the worst mistakes.

    It synchronizes with the device in every batch: for the final evaluation only.

    Args:
        model: The model.
        loader: Batches of the split.
        num_classes: Number of classes.
        device: Device of the model.
        reducer: The other ranks.
        temperature: Divisor of the logits within the model.
    """
    sums, mistakes, scores = _Sums(num_classes, device), WorstMistakes(), ScoreSums(device)
    calibration, uncalibrated = CalibrationSums(device), CalibrationSums(device)
    with torch.inference_mode():
        for batch, labels_B, logits_BK in logits_of(model, loader, device):
            sums.add(labels_B, logits_BK)
            scores.add(logits_BK * temperature)
            log_probabilities_BK = functional.log_softmax(logits_BK.double(), dim=1)
            # The same argmax as in the confusion matrix: ties are broken in the same way.
            predicted_B = logits_BK.argmax(1)
            confidence_B = log_probabilities_BK.gather(1, predicted_B[:, None])[:, 0].exp()
            calibration.add(confidence_B, predicted_B == labels_B)
            before_BK = torch.softmax(logits_BK.double() * temperature, dim=1)
            uncalibrated.add(before_BK.gather(1, predicted_B[:, None])[:, 0], predicted_B == labels_B)
            mistakes.add(torch.from_numpy(batch.rows_B).to(device), labels_B, predicted_B, log_probabilities_BK)
    return DetailedEvaluation(
        **vars(sums.reduce(reducer)),
        calibration=calibration.reduce(reducer),
        uncalibrated=uncalibrated.reduce(reducer),
        scores=scores.reduce(reducer),
        mistakes=mistakes.reduce(reducer),
    )


MAX_IMAGES = 512
"""Number of images that are compared: in float32 a network may take several times as long."""


@dataclass(frozen=True)
class PrecisionDifference:
    """Differences between the predictions of a network in its serving precision and in float32."""

    images: int
    """Number of compared images."""
    mean: float
    """Mean over images of the absolute difference of the probability of the served label."""
    largest: float
    """Maximum of that difference."""
    changed_labels: int
    """Number of images with different labels."""


def compare_precisions(
    served: nn.Module, exact: nn.Module, loader: CacheLoader, device: torch.device, reducer: Reducer
) -> PrecisionDifference:
    """Return the differences on the first MAX_IMAGES images of a split over all ranks; a collective operation.

    Args:
        served: The network in its serving precision.
        exact: The same network in float32.
        loader: Batches of the split.
        device: Device of the networks.
        reducer: The other ranks.
    """
    most = math.ceil(MAX_IMAGES / reducer.num_ranks)
    sums, largest = torch.zeros(3, dtype=torch.float64), 0.0
    with torch.inference_mode():
        for batch, _labels_B, logits_BK in logits_of(served, loader, device):
            label_B = logits_BK.argmax(1)
            exact_BK = exact(batch.inputs.to(device))
            served_B, exact_B = (
                torch.softmax(one_BK.double(), dim=1).gather(1, label_B[:, None])[:, 0]
                for one_BK in (logits_BK, exact_BK)
            )
            difference_B = (served_B - exact_B).abs().cpu()
            changed = (exact_BK.argmax(1) != label_B).sum().cpu()
            sums += torch.stack([torch.tensor(float(len(label_B))), difference_B.sum(), changed.float()])
            largest = max(largest, float(difference_B.max()))
            if sums[0] >= most:
                break
    num_images, difference, changed_labels = reducer.sum(sums).tolist()
    return PrecisionDifference(
        images=int(num_images),
        mean=difference / max(num_images, 1),
        largest=float(gather_numbers(reducer, largest).max()),
        changed_labels=int(changed_labels),
    )
