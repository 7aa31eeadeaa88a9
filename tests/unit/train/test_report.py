"""The class table and the confusion matrix, with numbers worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from tasks.train.evaluate import Evaluation
from tasks.train.report import class_table, draw_confusion, log_evaluation

CLASSES = ("ant", "bee", "cat")
CONFUSION = torch.tensor([[3, 1, 0], [1, 5, 0], [2, 0, 0]])
"""No picture is called a cat."""


class RecordingRun:
    """Takes in what a run would log."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[Any]]] = {}
        self.figures: dict[str, Figure] = {}

    def log_table(self, rows: dict[str, list[Any]], name: str) -> None:
        """Keep the table."""
        self.tables[name] = rows

    def log_figure(self, figure: Figure, name: str) -> None:
        """Keep the figure."""
        self.figures[name] = figure


def test_class_table_has_precision_recall_and_f1() -> None:
    """Ant: 3 of 6 predictions right, 3 of 4 found; bee: 5 of 6 and 5 of 6."""
    table = class_table(Evaluation(0.5, CONFUSION, 1.0), CLASSES)

    assert table["class"] == ["ant", "bee", "cat"]
    assert table["pictures"] == [4, 6, 2]
    assert table["precision"][:2] == pytest.approx([3 / 6, 5 / 6])
    assert table["recall"][:2] == pytest.approx([3 / 4, 5 / 6])
    assert table["f1"][:2] == pytest.approx([0.6, 5 / 6])


def test_class_that_is_never_predicted_has_precision_zero() -> None:
    """There is nothing to divide by, and no NaN in the table."""
    table = class_table(Evaluation(0.5, CONFUSION, 1.0), CLASSES)

    assert [table[name][2] for name in ("precision", "recall", "f1")] == [0.0, 0.0, 0.0]


def test_perfect_classifier_has_ones_everywhere() -> None:
    """Where nothing is mistaken, precision, recall and F1 are 1."""
    table = class_table(Evaluation(0.5, torch.diag(torch.tensor([2, 7, 1])), 1.0), CLASSES)

    assert table["precision"] == table["recall"] == table["f1"] == [1.0, 1.0, 1.0]


def test_confusion_matrix_is_drawn_as_shares_of_the_true_class(tmp_path: Path) -> None:
    """The figure names the classes on both axes, and its cells are shares of the row."""
    figure = draw_confusion(CONFUSION, CLASSES)

    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(CLASSES)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(CLASSES)
    assert axes.images[0].get_array()[0].tolist() == [0.75, 0.25, 0.0]
    figure.savefig(tmp_path / "confusion.png", dpi=40)
    assert (tmp_path / "confusion.png").stat().st_size > 0


def test_table_and_matrix_of_the_split_test_are_logged() -> None:
    """Each once, by the names under which the README shows them."""
    run = RecordingRun()

    log_evaluation(run, Evaluation(0.5, CONFUSION, 1.0), CLASSES)  # type: ignore[arg-type]

    assert run.tables["test_classes.json"]["class"] == list(CLASSES)
    assert list(run.figures) == ["test_confusion.png"]
