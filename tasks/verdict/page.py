"""The page of a verdict: its learning curve and confusion matrix as figures, and its tables as Markdown."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tasks.refs import Verdict
from tasks.report.figures import QUIET_COLOUR, VAL_COLOUR, WRONG_COLOUR, draw_confusion, new_figure, png_of
from tasks.report.fonts import drawn_with_fonts
from tasks.report.page import MAX_IMAGE_BYTES, fit_images
from tasks.text.markup import markdown_table, markdown_text
from tasks.verdict.curve import INTERVAL, Curves
from tasks.verdict.probe import Judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_verdict(
    verdict: Verdict, curves: Curves, judged: Judged, classes: Sequence[str], num_trained: int
) -> dict[str, bytes]:
    """Return the figures of a verdict as PNG files, by heading."""
    num_classes = len(classes)
    places_N = judged.labels_N * num_classes + judged.predicted_RSN[0, -1]
    confusion_KK = torch.from_numpy(np.bincount(places_N, minlength=num_classes**2).reshape(num_classes, num_classes))
    with drawn_with_fonts(classes):
        figures = {
            "Learning curve": draw_curve(verdict, curves, num_trained),
            "Confusion on held-out images": draw_confusion(confusion_KK, classes),
        }
        return {name: png_of(figure) for name, figure in figures.items()}


def draw_curve(verdict: Verdict, curves: Curves, num_trained: int) -> "Figure":
    """Draw the measured accuracies, the fitted curves up to twice the images, and the expected interval."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    images = np.geomspace(verdict.curve[0][0], max(2 * num_trained, verdict.curve[-1][0] + 1), 60)
    high, middle, low = np.array([1 - np.quantile(curves.at(one), INTERVAL) for one in images]).T
    axes.fill_between(images, low, high, color=VAL_COLOUR, alpha=0.15, label="95 % interval")
    axes.plot(images, middle, color=VAL_COLOUR, label="power law")
    axes.plot(*zip(*verdict.curve, strict=True), "o", color="black", markersize=4, label="measured on held-out images")
    assert verdict.interval is not None, "a page is of a verdict"
    axes.plot([num_trained] * 2, verdict.interval, "_-", color=WRONG_COLOUR, label="95 % interval of the test")
    axes.axvline(num_trained, color=QUIET_COLOUR, linewidth=1, linestyle="--")
    axes.set(xlabel="training images", ylabel="accuracy", xscale="log")
    ticks = [number for number, _accuracy in verdict.curve] + [2 * num_trained]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def verdict_markdown(verdict: Verdict, figures: Mapping[str, bytes]) -> str:
    """Return a verdict as Markdown: its sentence, the figures, weakest classes, and confused pairs."""
    parts = [f"# Verdict: {verdict.line}"]
    parts += [f"## {name}\n\n![{name}]({uri})" for name, uri in fit_images(figures, MAX_IMAGE_BYTES).items()]
    worth = [
        [markdown_text(one.name), f"{one.accuracy:.2f}", f"{one.images} more: {_points(*one.gain)}"]
        for one in verdict.weakest
    ]
    parts += [
        "## What more images are worth",
        markdown_table(["class", "expected accuracy", "points that twice the images are worth"], worth),
        "The images of the other classes are doubled as well.",
    ]
    confused = [
        [*map(markdown_text, (one.true, one.predicted)), f"{one.wrong:.1f} of {one.images}", _points(*one.share)]
        for one in verdict.confused
    ]
    parts += [
        "## Classes that will be confused",
        markdown_table(["true class", "taken for", "held-out images", "%"], confused),
        "Estimated before training, by a linear probe of the frozen backbone's features on held-out images of the "
        "splits `train` and `val`; the split `test` was not read. Values in brackets are 95 % intervals.",
    ]
    return "\n\n".join(parts)


def _points(share: float, low: float, high: float) -> str:
    """Return a share (0-1) and its interval in percentage points."""
    return f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"
