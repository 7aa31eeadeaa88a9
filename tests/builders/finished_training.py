"""Histories, evaluations and facts of finished training runs, made without training."""

from dataclasses import fields

import torch

from tasks.cache.manifest import open_cache
from tasks.config.train import TrainConfig
from tasks.metrics.calibration import Calibration, Scores
from tasks.metrics.evaluate import DetailedEvaluation, EpochMetrics, PrecisionDifference
from tasks.metrics.mistakes import Mistake
from tasks.model.pretrained import weights_digest
from tasks.refs import CacheRef
from tasks.report.model_card import TrainingFacts

CONFUSION = torch.tensor([[3, 1, 0], [1, 5, 0], [2, 0, 0]])
"""No image is predicted as a cat; 8 of 12 predictions are correct."""

MISTAKES = (Mistake(5, 2, 0, 0.97, 0.01, 4.6), Mistake(0, 0, 1, 0.6, 0.3, 1.2))


def history_of(num_epochs: int) -> list[EpochMetrics]:
    """Return metrics per epoch: all losses fall, and all other metrics rise."""
    names = [field.name for field in fields(EpochMetrics) if field.name != "epoch"]
    return [
        EpochMetrics(
            epoch=epoch,
            **{
                name: 2.0 / (epoch + 1 + index) if "loss" in name else 1.0 - 0.9 ** (epoch + 1 + index)
                for index, name in enumerate(names)
            },
        )
        for epoch in range(num_epochs)
    ]


def scores_of(*scores: float) -> Scores:
    """Return scores of images, given in ascending order."""
    return Scores(torch.tensor(scores, dtype=torch.float64))


def evaluation_of(
    confusion_KK: torch.Tensor = CONFUSION, mistakes: tuple[Mistake, ...] = MISTAKES
) -> DetailedEvaluation:
    """Return an evaluation in which every prediction has the probability 0.9, and had 0.95 before calibration."""
    counts, correct = torch.zeros((2, 15), dtype=torch.float64)
    counts[13], correct[13] = confusion_KK.sum(), confusion_KK.diagonal().sum()
    before = torch.zeros((2, 15), dtype=torch.float64)
    before[:, 14] = torch.stack([counts[13], correct[13]])
    return DetailedEvaluation(
        0.5,
        confusion_KK,
        1.0,
        0.45,
        calibration=Calibration(counts, correct, 0.9 * counts),
        uncalibrated=Calibration(before[0], before[1], 0.95 * before[0]),
        scores=scores_of(0.1, 0.2, 0.3, 0.95),
        mistakes=mistakes,
    )


def facts_of(cache: CacheRef, **changes: object) -> TrainingFacts:
    """Return the facts of a finished training run on the cache, with default settings except for the changes."""
    given = {
        "train": TrainConfig(recipe="head", weight_decay=0.0),
        "distributed": None,
        "cache": cache,
        "manifest": open_cache(cache),
        "weights_digest": weights_digest(TrainConfig().model, "DEFAULT"),
        "num_ranks": 1,
        "device": "cpu",
        "history": history_of(3),
        "best_epoch": 1,
        "max_epochs": 8,
        "phases": [(0, "head, weight decay 0")],
        "test": evaluation_of(),
        "precision": "bfloat16",
        "temperature": 1.25,
        "scores": scores_of(*(number / 20 for number in range(19))),
        "difference": PrecisionDifference(images=12, mean=0.002, largest=0.01, changed_labels=1),
    }
    return TrainingFacts(**(given | changes))  # type: ignore[arg-type]  # a stand-in with the attributes that are used
