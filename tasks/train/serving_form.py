"""Evaluation of a trained network in the form in which it is served: folded, in its serving precision, calibrated."""

from dataclasses import dataclass

import torch

from tasks.metrics.calibration import Scores, ScoreSums, TemperatureSums
from tasks.metrics.evaluate import (
    DetailedEvaluation,
    PrecisionDifference,
    compare_precisions,
    evaluate_in_detail,
    logits_of,
)
from tasks.model_package.description import Precision
from tasks.model_package.serving import serving_network
from tasks.refs import TEST, VAL
from tasks.train.context import TrainingContext
from tasks.train.features import BATCH


@dataclass(frozen=True)
class ServingEvaluation:
    """The serving form of a trained network, and its metrics on the split `test`."""

    precision: Precision
    temperature: float
    """Divisor of the logits, fitted on the split `val`."""
    scores: Scores
    """Images of the split `val` by their score, from which the thresholds of the label `unknown` follow."""
    evaluation: DetailedEvaluation
    """Metrics on the split `test` in the serving form."""
    difference: PrecisionDifference | None
    """Difference to the predictions in float32; None if that is the precision."""


def evaluate_serving_form(context: TrainingContext) -> ServingEvaluation:
    """Fit temperature and scores on `val`, and evaluate the network on `test` as inference uses it.

    It is a collective operation.

    The serving precision is that of the training run: bfloat16 where the device computes in it and `train.precision`
    does not forbid it.
    """
    precision: Precision = "bfloat16" if context.precision is torch.bfloat16 else "float32"
    reducer, device = context.reducer, context.device
    uncalibrated = serving_network(context.classifier, precision, temperature=1)
    sums, score_sums = TemperatureSums(device), ScoreSums(device)
    with torch.inference_mode():
        for _batch, labels_B, logits_BK in logits_of(uncalibrated, context.images(VAL, BATCH), device):
            sums.add(labels_B, logits_BK)
            score_sums.add(logits_BK)
    temperature, scores = sums.reduce(reducer), score_sums.reduce(reducer)
    served = serving_network(uncalibrated, precision, temperature)
    images = context.images(TEST, BATCH)
    evaluation = evaluate_in_detail(served, images, len(context.manifest.classes), device, reducer, temperature)
    difference = None
    if precision != "float32":
        exact = serving_network(uncalibrated, "float32", temperature)
        difference = compare_precisions(served, exact, images, device, reducer)
    return ServingEvaluation(precision, temperature, scores, evaluation, difference)
