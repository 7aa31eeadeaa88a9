"""The figures, drawn for few and for many classes: what they show, and that none of it is cut off."""

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
from tasks.report.figures import draw_calibration, draw_confusion, draw_learning_curves, draw_mistakes, shorten
from tests.builders.finished_training import history_of

CLASSES = ("ant", "bee", "cat")
CONFUSION = torch.tensor([[3, 1, 0], [1, 5, 0], [2, 0, 0]])

AWKWARD = ("a$b$c", r"a$\frac{$", "$_{^$", "<b>|`", "é ß ñ", "x" * 80)
"""Names of folders that mean something elsewhere."""


def texts_outside(figure: Figure) -> list[str]:
    """Draw the figure, and return the texts that are not wholly in it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = figure.bbox.padded(1.0)
    # Ticks beyond the ends of an axis are there and not drawn.
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
    """Say whether a label of the vertical axis lies over the next."""
    boxes = [label.get_window_extent() for label in labels]
    return any(first.y0 < second.y1 - 1 for first, second in pairwise(boxes))


def mistakes_of(num_mistakes: int, num_classes: int) -> list[Mistake]:
    """Return mistakes over all classes."""
    return [
        Mistake(row, row % num_classes, (row + 1) % num_classes, 0.9, 0.05, 3.0 - row / 10)
        for row in range(num_mistakes)
    ]


def test_confusion_matrix_is_drawn_as_shares_of_the_true_class() -> None:
    """Both axes name the classes; cells are shares of the row, and say how many images they are, if any."""
    axes = draw_confusion(CONFUSION, CLASSES).axes[0]

    assert [label.get_text() for label in axes.get_xticklabels()] == list(CLASSES)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(CLASSES)
    assert axes.images[0].get_array()[0].tolist() == [0.75, 0.25, 0.0]
    assert [text.get_text() for text in axes.texts] == ["3", "1", "1", "5", "2"]


@pytest.mark.parametrize("num_classes", [2, 10, 100, 400])
def test_confusion_matrix_has_readable_labels_for_any_number_of_classes(num_classes: int) -> None:
    """None is cut off or lies over its neighbour; of too many every n-th is left, and of these none is tiny."""
    classes = [f"{index:03d}.class-with-a-name" for index in range(num_classes)]
    figure = draw_confusion(torch.eye(num_classes, dtype=torch.int64), classes)

    assert texts_outside(figure) == []
    labels = figure.axes[0].get_yticklabels()
    assert not overlapping(labels)
    assert min(label.get_fontsize() for label in labels) >= 5.0
    assert len(labels) == num_classes or num_classes > 100
    assert max(figure.get_size_inches()) < 26


def test_class_names_are_drawn_as_they_are() -> None:
    """Dollar signs and backslashes are no formula, and a long name is shortened and cut off nowhere."""
    num_classes = len(AWKWARD)

    for figure in (
        draw_confusion(torch.eye(num_classes, dtype=torch.int64), AWKWARD),
        draw_mistakes(torch.zeros((6, 8, 8, 3), dtype=torch.uint8), mistakes_of(6, num_classes), AWKWARD, AWKWARD),
    ):
        assert texts_outside(figure) == []
        assert any("a$b$c" in text.get_text() for text in figure.findobj(Text))


def test_reliability_diagram_has_a_bar_a_bin() -> None:
    """As high as the bin's accuracy; an empty bin has no mark, and the error is in the title."""
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


@pytest.mark.parametrize("num_epochs", [1, 5, 200])
def test_learning_curves_show_every_epoch_and_mark_the_best(num_epochs: int) -> None:
    """Loss and accuracy of both splits, the learning rate, and whole epochs on the axis."""
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
def test_gallery_shows_each_image_with_what_it_is_and_what_it_was_taken_for(num_mistakes: int) -> None:
    """Every one has a place, in the order given, with its file's name; places left over stay empty."""
    images = torch.arange(num_mistakes, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 16, 16, 3)
    names = [f"folder/{row:04d}.jpg" for row in range(num_mistakes)]
    figure = draw_mistakes(images, mistakes_of(num_mistakes, 3), names, CLASSES)

    shown = [axes for axes in figure.axes if axes.images]
    assert [int(axes.images[0].get_array()[0, 0, 0]) for axes in shown] == list(range(num_mistakes))
    assert [axes.get_xlabel() for axes in shown] == names
    assert [text.get_text() for text in shown[0].texts] == ["ant 0.05", "→ bee 0.90"]
    assert all(not axes.axison for axes in figure.axes if not axes.images)
    assert texts_outside(figure) == []


def test_figures_are_images() -> None:
    """What is saved is a PNG of the size that was drawn."""
    content = io.BytesIO()
    figure = draw_confusion(CONFUSION, CLASSES)
    figure.savefig(content, format="png")

    assert Image.open(content).size == tuple(int(side) for side in figure.get_size_inches() * figure.dpi)


def test_long_names_lose_their_middle() -> None:
    """Begin and end tell names apart; short ones stay."""
    assert shorten("short", 5) == "short"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert len(shorten("x" * 100, 22)) == 22
