"""What a person looks at after a training: the confusion matrix and the table by class."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tasks.tracking import TrackedRun
from tasks.train.evaluate import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def class_table(evaluation: Evaluation, classes: Sequence[str]) -> dict[str, list[object]]:
    """Return pictures, precision, recall and F1 (0-1) of each of K classes; one never predicted has precision 0."""
    hits = evaluation.confusion_KK.diagonal().double()
    true = evaluation.confusion_KK.sum(dim=1).double()
    predicted = evaluation.confusion_KK.sum(dim=0).double()
    return {
        "class": list(classes),
        "pictures": true.long().tolist(),
        "precision": (hits / predicted.clamp(min=1)).tolist(),
        "recall": (hits / true.clamp(min=1)).tolist(),
        "f1": evaluation.class_f1.tolist(),
    }


def draw_confusion(confusion_KK: torch.Tensor, classes: Sequence[str]) -> "Figure":
    """Draw the confusion matrix, each row as shares of its true class."""
    # Here and not at the top: on its first import matplotlib lists every font, which no rank but one needs.
    from matplotlib.figure import Figure

    side = min(4 + 0.28 * len(classes), 24)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = confusion_KK.double() / confusion_KK.sum(dim=1, keepdim=True).clamp(min=1)
    image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(classes)), classes, rotation=90)
    axes.set_yticks(range(len(classes)), classes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    figure.colorbar(image, ax=axes, label="share of the true class")
    return figure


def log_evaluation(run: TrackedRun, test: Evaluation, classes: Sequence[str]) -> None:
    """Log confusion matrix and class table of the split `test`."""
    run.log_table(class_table(test, classes), "test_classes.json")
    run.log_figure(draw_confusion(test.confusion_KK, classes), "test_confusion.png")
