"""The figures of a training run, drawn with matplotlib.

matplotlib is imported inside the functions: its first import lists all fonts, and only rank 0 needs it. Class names
are drawn literally: a dollar sign does not begin a formula.
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING
from unicodedata import combining, east_asian_width

import numpy as np
import torch

from tasks.metrics.calibration import NUM_BINS, Calibration, Scores
from tasks.metrics.evaluate import EpochMetrics
from tasks.metrics.mistakes import Mistake

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_COLOUR, VAL_COLOUR, QUIET_COLOUR, WRONG_COLOUR = "#7f7f7f", "#1f77b4", "#b0b0b0", "#c0392b"

MAX_SIDE_INCHES = 24.0
"""Maximum side of a confusion matrix: 2,400 pixels, which is about the width of a screen."""

NUM_DRAWN, CLASS_COLUMNS = 96, 12
"""Maximum number of images of the data set that are drawn, and of images beside each other."""

COUNTS_UP_TO_CLASSES = 20
"""Maximum number of classes with which the cells of a confusion matrix have room for numbers."""


def shorten(name: str, max_characters: int) -> str:
    """Return a name of at most `max_characters`, with an ellipsis for the middle of a longer one."""
    if len(name) <= max_characters:
        return name
    begin = max_characters // 2
    return f"{name[:begin]}…{name[len(name) - (max_characters - begin - 1) :]}"


def wrap(text: str, columns: int) -> str:
    """Return a text in lines of at most `columns` Latin letters; East Asian letters have the width of two."""
    lines, width = [""], 0
    for character in text:
        wide = 0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1
        if width + wide > columns:
            lines, width = [*lines, ""], 0
        lines[-1] += character
        width += wide
    return "\n".join(lines)


def new_figure(width: float, height: float, title: str = "") -> "Figure":
    """Return an empty figure of this size in inches, with a small title at its upper left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.005, ha="left", fontsize=7.5, color=TRAIN_COLOUR)
    return figure


def png_of(figure: "Figure") -> bytes:
    """Return a figure as the content of a PNG file."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Of characters that no font of this machine has, one for each.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_confusion(confusion_KK: torch.Tensor, classes: Sequence[str]) -> "Figure":
    """Draw the confusion matrix, each row as fractions of its true class, with numbers of images if there is room.

    Args:
        confusion_KK: int64, numbers of images by true class (rows) and predicted class (columns).
        classes: Class names by index.
    """
    from matplotlib.colors import PowerNorm

    num_classes = len(classes)
    side = min(3.2 + 0.28 * num_classes, MAX_SIDE_INCHES)
    figure = new_figure(side + 1.2, side)
    axes = figure.subplots()
    shares_KK = confusion_KK.double() / confusion_KK.sum(dim=1, keepdim=True).clamp(min=1)
    # The colour scale is the square root of the fraction, so that rare confusions are visible beside the diagonal.
    drawn = axes.imshow(shares_KK.numpy(), cmap="Blues", norm=PowerNorm(0.5, vmin=0.0, vmax=1.0))
    # Length of the axis per class, in points of 1/72 inch. Labels below 5 points are not legible: then only every n-th
    # class has one.
    points = 0.85 * side * 72 / num_classes
    size = min(10.0, max(5.0, 0.8 * points))
    shown = range(0, num_classes, max(1, math.ceil(size / points)))
    names = [shorten(classes[index], 28) for index in shown]
    upright = 0.7 * size * max(map(len, names)) < points
    axes.set_xticks(shown, names, rotation=0 if upright else 90, fontsize=size, parse_math=False)
    axes.set_yticks(shown, names, fontsize=size, parse_math=False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if num_classes <= COUNTS_UP_TO_CLASSES:
        for (row, column), count in np.ndenumerate(confusion_KK.numpy()):
            if count:
                colour = "white" if shares_KK[row, column] > 0.3 else "#303030"
                axes.text(column, row, str(count), ha="center", va="center", fontsize=9, color=colour)
    bar = figure.colorbar(drawn, ax=axes, label="share of the true class", shrink=0.8, aspect=30, pad=0.02)
    bar.set_ticks([0.0, 0.05, 0.2, 0.5, 1.0])
    return figure


def draw_calibration(calibration: Calibration) -> "Figure":
    """Draw the reliability diagram: accuracy by predicted probability, and the number of images in each bin."""
    figure = new_figure(5.2, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = 1.0 / NUM_BINS
    left = np.arange(NUM_BINS) * width
    accuracy = calibration.bin_accuracy.nan_to_num(0.0).numpy()
    upper.bar(left, accuracy, width, align="edge", color=VAL_COLOUR, edgecolor="white", label="accuracy")
    filled = (calibration.counts > 0).numpy()
    upper.plot(
        calibration.bin_confidence.numpy()[filled],
        accuracy[filled],
        "o",
        color="black",
        markersize=4,
        clip_on=False,
        label="at the mean probability",
    )
    upper.plot([0, 1], [0, 1], "--", color=TRAIN_COLOUR, linewidth=1, label="perfectly calibrated")
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    upper.set_title(f"expected calibration error {calibration.error:.3f}", fontsize=11)
    # Outside of the axes, where bars may be at any position.
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    lower.bar(left, calibration.counts.numpy(), width, align="edge", color=QUIET_COLOUR, edgecolor="white")
    lower.set(xlabel="probability of the predicted class", ylabel="images")
    lower.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    _tidy(upper, lower)
    return figure


def draw_unknown(val: Scores, test: Scores) -> "Figure":
    """Draw the fraction of the images of two splits with a score of `unknown` above each threshold."""
    figure = new_figure(5.2, 4.0)
    axes = figure.subplots()
    for split, scores, colour in (("val", val, VAL_COLOUR), ("test", test, TRAIN_COLOUR)):
        if num := len(scores.ascending):
            label = f"{split}, {num} images"
            axes.ecdf(scores.ascending.numpy(), complementary=True, compress=True, color=colour, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="threshold of unknown_score", ylabel="images above it: false alarms")
    axes.set_title("images of the classes that are called unknown", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    _tidy(axes)
    return figure


def draw_learning_curves(history: Sequence[EpochMetrics], best_epoch: int) -> "Figure":
    """Draw loss and accuracy of the splits train and val, and the learning rates, by epoch."""
    from matplotlib.ticker import MaxNLocator

    epochs = [metrics.epoch for metrics in history]
    figure = new_figure(10.5, 3.4)
    loss, accuracy, rate = figure.subplots(1, 3)
    # With markers for few epochs: a single epoch would not be visible as a line.
    marker = "o" if len(history) <= 30 else ""
    for axes, metric in ((loss, "loss"), (accuracy, "accuracy")):
        for split, colour in (("train", TRAIN_COLOUR), ("val", VAL_COLOUR)):
            values = [getattr(metrics, f"{split}_{metric}") for metrics in history]
            axes.plot(epochs, values, color=colour, marker=marker, markersize=3, label=split)
        axes.set_title(metric, fontsize=11)
    rates = [field.name for field in fields(EpochMetrics) if field.name.endswith("learning_rate")]
    for name, style in zip(rates, ("-", "--", ":", "-."), strict=False):
        values = [getattr(metrics, name) for metrics in history]
        rate.plot(epochs, values, style, color="black", marker=marker, markersize=3, label=name.replace("_", " "))
    rate.set_title("learning rate", fontsize=11)
    rate.ticklabel_format(axis="y", scilimits=(-2, 3))
    for axes in (loss, accuracy, rate):
        axes.axvline(best_epoch, color=WRONG_COLOUR, linewidth=1, linestyle="--", label=f"best epoch {best_epoch}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("epoch")
        margin = max(0.5, 0.03 * len(epochs))
        axes.set_xlim(epochs[0] - margin, epochs[-1] + margin)
    for axes in (loss, accuracy, rate) if len(rates) > 1 else (loss, accuracy):
        axes.legend(frameon=False, fontsize=9)
    _tidy(loss, accuracy, rate)
    return figure


def draw_mistakes(
    images_NHWC: torch.Tensor, mistakes: Sequence[Mistake], names: Sequence[str], classes: Sequence[str]
) -> "Figure":
    """Draw misclassified images, each with its whole name, its true class and its predicted class.

    Args:
        images_NHWC: uint8, one image per mistake, twice as wide with the heat map of its predicted class beside it.
        mistakes: Mistakes, the worst first.
        names: Name of each image.
        classes: Class names by index.
    """
    with_heat = images_NHWC.shape[2] > images_NHWC.shape[1]
    width = 4.0 if with_heat else 2.0
    # The title needs the width of two.
    columns = min(int(12 / width), max(int(4 / width), len(mistakes)))
    rows = math.ceil(len(mistakes) / columns)
    texts = []
    for mistake, name in zip(mistakes, names, strict=True):
        true = wrap(f"{classes[mistake.true]} {mistake.true_probability:.2f}", 26)
        predicted = wrap(f"→ {classes[mistake.predicted]} {mistake.probability:.2f}", 26)
        texts.append((true, predicted, wrap(name, 36)))
    # Inches of the lines of text beyond one each: the image with the most of them decides for its row.
    extra = [0.14 * (true + predicted).count("\n") + 0.1 * name.count("\n") for true, predicted, name in texts]
    height = sum(2.55 + max(extra[first : first + columns]) for first in range(0, len(texts), columns))
    heat = "; beside it bright where it speaks for the predicted class (Grad-CAM)" if with_heat else ""
    title = f"true class, → predicted class, with the model's probability of each{heat}"
    figure = new_figure(width * columns, height + 0.3, title)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(mistakes) :]:
        axes.set_axis_off()
    for axes, image, (true, predicted, name) in zip(grid.flat, images_NHWC.numpy(), texts, strict=False):
        axes.imshow(image)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(QUIET_COLOUR)
        # Above the image, in two colours: the true and the predicted class.
        above = 14 + 10 * predicted.count("\n")
        for text, points, colour in ((true, above, "black"), (predicted, 3, WRONG_COLOUR)):
            axes.annotate(text, (0.0, 1.0), (0, points), fontsize=8, color=colour, parse_math=False, **_ABOVE)
        axes.set_xlabel(name, fontsize=6, color=TRAIN_COLOUR, parse_math=False)
    return figure


def draw_classes(images: Sequence[Sequence[torch.Tensor]], classes: Sequence[str]) -> "Figure":
    """Draw images of each class, with the whole name of the class above its first image.

    Args:
        images: uint8 images by class, at most `images_per_class` of each.
        classes: Class names by index; of more than NUM_DRAWN, the first are drawn.
    """
    width = images_per_class(len(classes))
    columns = CLASS_COLUMNS // width  # classes beside each other
    shown = [wrap(name, 15 * width) for name in classes[:NUM_DRAWN]]
    rows = math.ceil(len(shown) / columns)
    lines = [name.count("\n") for name in shown]
    height = sum(1.35 + 0.12 * max(lines[first : first + columns]) for first in range(0, len(shown), columns))
    left_out = f", the first {len(shown)} of {len(classes)}" if len(shown) < len(classes) else ""
    figure = new_figure(1.0 * CLASS_COLUMNS, height + 0.3, f"training images by class{left_out}")
    grid = figure.subplots(rows, CLASS_COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for index, name in enumerate(shown):
        row, column = divmod(index, columns)
        cells = grid[row, column * width : (column + 1) * width]
        cells[0].annotate(name, (0.0, 1.0), (0, 3), fontsize=7, parse_math=False, **_ABOVE)
        for axes, image in zip(cells, images[index], strict=False):
            axes.imshow(image.numpy())
    return figure


def images_per_class(num_classes: int) -> int:
    """Return the number of images of each class that `draw_classes` has room for, a divisor of its columns."""
    return next(number for number in (6, 4, 3, 2, 1) if number * num_classes <= NUM_DRAWN or number == 1)


_ABOVE = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "left", "va": "bottom"}


def _tidy(*all_axes: "Axes") -> None:
    """Remove superfluous spines, and add a light grid."""
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
