"""Tests of the figures for few and many classes: their content, and that no text is cut off."""

import io
from itertools import pairwise

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from tasks.metrics.calibration import NUM_BINS, Calibration
from tasks.metrics.mistakes import Mistake
from tasks.report.figures import (
    draw_calibration,
    draw_classes,
    draw_confusion,
    draw_learning_curves,
    draw_mistakes,
    draw_unknown,
    images_per_class,
    shorten,
)
from tests.builders.finished_training import history_of, scores_of

CLASSES = ("ant", "bee", "cat")
CONFUSION = torch.tensor([[3, 1, 0], [1, 5, 0], [2, 0, 0]])

AWKWARD = ("a$b$c", r"a$\frac{$", "$_{^$", "<b>|`", "é ß ñ", "x" * 80)
"""Class names with characters that have a meaning in TeX, HTML or Markdown, and a long one."""


def texts_outside(figure: Figure) -> list[str]:
    """Draw the figure, and return the texts that are cut off at its edges."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = figure.bbox.padded(1.0)
    # Ticks beyond the ends of an axis exist, but are not drawn.
    beyond = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in beyond]
    assert shown
    outside = []
    for text in shown:
        box = text.get_window_extent()
        if not (whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1):
            outside.append(text.get_text())
    return outside


def overlapping(labels: list[Text]) -> bool:
    """Return whether a label of the vertical axis overlaps the next one."""
    boxes = [label.get_window_extent() for label in labels]
    return any(first.y0 < second.y1 - 1 for first, second in pairwise(boxes))


def mistakes_of(num_mistakes: int, num_classes: int) -> list[Mistake]:
    """Build mistakes that are spread over all classes."""
    return [
        Mistake(row, row % num_classes, (row + 1) % num_classes, 0.9, 0.05, 3.0 - row / 10)
        for row in range(num_mistakes)
    ]


def test_confusion_matrix_is_drawn_as_shares_of_the_true_class() -> None:
    """Both axes name the classes; cells are fractions of the row, labelled with their number of images if not zero."""
    axes = draw_confusion(CONFUSION, CLASSES).axes[0]

    assert [label.get_text() for label in axes.get_xticklabels()] == list(CLASSES)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(CLASSES)
    assert axes.images[0].get_array()[0].tolist() == [0.75, 0.25, 0.0]
    assert [text.get_text() for text in axes.texts] == ["3", "1", "1", "5", "2"]


@pytest.mark.parametrize("num_classes", [2, 10, 100, 400])
def test_confusion_matrix_has_readable_labels_for_any_number_of_classes(num_classes: int) -> None:
    """No label is cut off, overlaps its neighbour or is tiny; with too many classes only every n-th has a label."""
    classes = [f"{index:03d}.class-with-a-name" for index in range(num_classes)]
    figure = draw_confusion(torch.eye(num_classes, dtype=torch.int64), classes)

    assert texts_outside(figure) == []
    labels = figure.axes[0].get_yticklabels()
    assert not overlapping(labels)
    assert min(label.get_fontsize() for label in labels) >= 5.0
    assert len(labels) == num_classes or num_classes > 100
    assert max(figure.get_size_inches()) < 26


def test_class_names_are_drawn_literally() -> None:
    """Dollar signs and backslashes do not begin a formula, and long names are shortened instead of cut off."""
    num_classes = len(AWKWARD)

    for figure in (
        draw_confusion(torch.eye(num_classes, dtype=torch.int64), AWKWARD),
        draw_mistakes(torch.zeros((6, 8, 8, 3), dtype=torch.uint8), mistakes_of(6, num_classes), AWKWARD, AWKWARD),
    ):
        assert texts_outside(figure) == []
        assert any("a$b$c" in text.get_text() for text in figure.findobj(Text))


def test_reliability_diagram_has_one_bar_per_bin() -> None:
    """A bar's height is the bin's accuracy; an empty bin has no marker, and the error is in the title."""
    counts, correct, confidence = torch.zeros((3, NUM_BINS), dtype=torch.float64)
    counts[14], correct[14], confidence[14] = 4, 3, 3.9
    counts[8], correct[8], confidence[8] = 1, 1, 0.55
    figure = draw_calibration(Calibration(counts, correct, confidence))

    upper, lower = figure.axes
    heights = [bar.get_height() for bar in upper.patches]
    assert len(heights) == NUM_BINS
    assert (heights[14], heights[8], heights[0]) == (0.75, 1.0, 0.0)
    assert [bar.get_height() for bar in lower.patches][14] == 4
    assert upper.lines[0].get_xdata().tolist() == pytest.approx([0.55, 0.975])
    assert upper.get_title() == f"expected calibration error {(0.9 + 0.45) / 5:.3f}"
    assert texts_outside(figure) == []


def test_curve_of_unknown_images_falls_with_the_threshold() -> None:
    """Half of the images of `val` are above 0.5; a split without images has no line."""
    figure = draw_unknown(scores_of(0.2, 0.8), scores_of())

    (axes,) = figure.axes
    (val,) = axes.lines
    assert [*zip(val.get_xdata(), val.get_ydata(), strict=True)] == [(0.2, 1.0), (0.8, 0.5), (0.8, 0.0)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["val, 2 images"]
    assert texts_outside(figure) == []


@pytest.mark.parametrize("num_epochs", [1, 5, 200])
def test_learning_curves_show_every_epoch_and_mark_the_best(num_epochs: int) -> None:
    """They show loss and accuracy of both splits and the learning rate, with whole epochs on the axis."""
    history, best = history_of(num_epochs), num_epochs // 2
    figure = draw_learning_curves(history, best)

    loss, accuracy, rate = figure.axes
    assert [line.get_label() for line in loss.lines] == ["train", "val", f"best epoch {best}"]
    assert list(loss.lines[1].get_ydata()) == [metrics.val_loss for metrics in history]
    assert list(accuracy.lines[0].get_ydata()) == [metrics.train_accuracy for metrics in history]
    assert list(rate.lines[0].get_ydata()) == [metrics.learning_rate for metrics in history]
    assert [axes.lines[-1].get_xdata()[0] for axes in figure.axes] == [best, best, best]
    assert texts_outside(figure) == []
    assert all(float(tick).is_integer() for tick in loss.get_xticks())


@pytest.mark.parametrize("num_mistakes", [1, 5, 7, 24])
def test_gallery_shows_each_image_with_its_true_and_predicted_class(num_mistakes: int) -> None:
    """Images are in the given order, with their file names; remaining axes stay empty."""
    images = torch.arange(num_mistakes, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 16, 16, 3)
    names = [f"folder/{row:04d}.jpg" for row in range(num_mistakes)]
    figure = draw_mistakes(images, mistakes_of(num_mistakes, 3), names, CLASSES)

    shown = [axes for axes in figure.axes if axes.images]
    assert [int(axes.images[0].get_array()[0, 0, 0]) for axes in shown] == list(range(num_mistakes))
    assert [axes.get_xlabel() for axes in shown] == names
    assert [text.get_text() for text in shown[0].texts] == ["ant 0.05", "→ bee 0.90"]
    assert all(not axes.axison for axes in figure.axes if not axes.images)
    assert texts_outside(figure) == []


def test_figure_is_saved_at_its_size() -> None:
    """The saved PNG has the size of the figure times its resolution."""
    content = io.BytesIO()
    figure = draw_confusion(CONFUSION, CLASSES)
    figure.savefig(content, format="png")

    assert Image.open(content).size == tuple(int(side) for side in figure.get_size_inches() * figure.dpi)


def test_long_names_lose_their_middle() -> None:
    """The beginning and the end of a long name are kept; a short name is unchanged."""
    assert shorten("short", 5) == "short"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert len(shorten("x" * 100, 22)) == 22


def test_gallery_has_whole_names_of_any_length_and_script() -> None:
    """Long names have several lines, of the letters of the whole name, and nothing is cut off."""
    names = [
        "IMG_2024-06-01 a long name as phones give them, edited (final) copy of image_0012.jpg",
        "写真" * 30,
        "a.jpg",
    ]
    classes = ("a class with a long name, longer than an image is wide", "猫" * 20, "cat")
    figure = draw_mistakes(torch.zeros((3, 16, 16, 3), dtype=torch.uint8), mistakes_of(3, 3), names, classes)

    shown = [axes for axes in figure.axes if axes.images]
    assert [axes.get_xlabel().replace("\n", "") for axes in shown] == names
    assert shown[0].texts[0].get_text().replace("\n", "") == f"{classes[0]} 0.05"
    assert shown[0].texts[1].get_text().replace("\n", "") == f"→ {classes[1]} 0.90"
    assert texts_outside(figure) == []
    rows = [axes.get_window_extent() for axes in shown]
    widest = max(line.get_window_extent().width for axes in shown for line in (*axes.texts, axes.xaxis.label))
    assert widest <= 1.25 * rows[0].width


@pytest.mark.parametrize("num_classes", [2, 10, 40, 200])
def test_data_set_is_drawn_by_class_with_whole_names(num_classes: int) -> None:
    """Each drawn class has its images below its name; a class without one has its name, and nothing is cut off."""
    classes = [f"{index:03d}.a class with a name of some length" for index in range(num_classes)]
    per_class, drawn = images_per_class(num_classes), min(num_classes, 96)
    images = [[torch.full((8, 8, 3), index, dtype=torch.uint8)] * per_class for index in range(num_classes - 1)]
    figure = draw_classes([*images, []], classes)

    named = [axes for axes in figure.axes if axes.texts]
    assert [axes.texts[0].get_text().replace("\n", "") for axes in named] == classes[:drawn]
    firsts = [int(axes.images[0].get_array()[0, 0, 0]) for axes in named if axes.images]
    assert firsts == [*range(min(num_classes - 1, drawn))]
    assert sum(len(axes.images) for axes in figure.axes) == per_class * len(firsts)
    assert texts_outside(figure) == []
    assert ("the first 96 of 200" in figure.get_suptitle()) == (num_classes == 200)
