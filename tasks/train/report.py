"""What a person looks at after a training: the confusion matrix and the table by class."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tasks.tracking import TrackedRun
from tasks.train.loop import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def class_table(confusion_KK: torch.Tensor, classes: Sequence[str]) -> dict[str, list[object]]:
    """Return pictures, precision, recall and F1 (0-1) of each class; a class never predicted has precision 0.

    Args:
        confusion_KK: int64 (K, K), rows are true classes, columns predicted ones.
        classes: K labels.
    """
    hits = confusion_KK.diagonal().double()
    true = confusion_KK.sum(dim=1).double()
    predicted = confusion_KK.sum(dim=0).double()
    return {
        "class": list(classes),
        "pictures": true.long().tolist(),
        "precision": (hits / predicted.clamp(min=1)).tolist(),
        "recall": (hits / true.clamp(min=1)).tolist(),
        "f1": (2 * hits / (true + predicted).clamp(min=1)).tolist(),
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
    """Log confusion matrix and class table of the split `test`, and their macro F1."""
    table = class_table(test.confusion_KK, classes)
    f1 = torch.tensor(table["f1"], dtype=torch.float64)
    present = torch.tensor(table["pictures"]) > 0
    run.log_metrics({"test_macro_f1": float(f1[present].mean())}, step=0)
    run.log_table(table, "test_classes.json")
    run.log_figure(draw_confusion(test.confusion_KK, classes), "test_confusion.png")
