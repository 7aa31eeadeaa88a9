"""Tests of the class table, with values computed by hand, and of the parts of a training run's report."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from tasks.explain.explainer import HeatOfPackage
from tasks.metrics.evaluate import Evaluation
from tasks.model_package.classifier import save_classifier
from tasks.model_package.network import build_network
from tasks.refs import CacheRef
from tasks.report.report import class_table, log_report
from tasks.storage import Storage
from tests.builders.caches import noise
from tests.builders.finished_training import CONFUSION, evaluation_of, facts_of

CLASSES = ("ant", "bee", "cat")
COUNTS = [3, 3, 3]


class RecordingRun:
    """A fake of TrackedRun that keeps the logged objects."""

    run_id = "run"
    code_version = "abc"

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[Any]]] = {}
        self.figures: dict[str, Figure] = {}
        self.texts: dict[str, str] = {}
        self.folders: dict[str, list[str]] = {}
        self.description = ""

    def log_table(self, rows: dict[str, list[Any]], name: str) -> None:
        """Keep the table."""
        self.tables[name] = rows

    def log_figure(self, figure: Figure, name: str) -> None:
        """Keep the figure."""
        self.figures[name] = figure

    def log_text(self, text: str, name: str) -> None:
        """Keep the text."""
        self.texts[name] = text

    def describe(self, text: str) -> None:
        """Keep the description."""
        self.description = text

    def log_folder(self, folder: Path, name: str) -> None:
        """Keep the names of the files."""
        self.folders[name] = [path.name for path in folder.iterdir()]


@pytest.fixture
def cache(make_cache: Callable[..., CacheRef]) -> CacheRef:
    """Build a cache of noise images, with 12 rows in the split test."""
    return make_cache({"train": 9, "val": 3, "test": 12})


@pytest.fixture
def heat(tmp_path: Path) -> HeatOfPackage:
    """Return the heat maps of a network with random weights."""
    torch.manual_seed(1)
    save_classifier(tmp_path / "package", "resnet18", build_network("resnet18", 3).state_dict(), CLASSES, 16)
    return HeatOfPackage(tmp_path / "package", torch.device("cpu"))


def test_class_table_has_precision_recall_and_f1() -> None:
    """For ant, 3 of 6 predictions and 3 of 4 images are correct; for bee, 5 of 6 and 5 of 6."""
    table = class_table(Evaluation(0.5, CONFUSION, 1.0, 0.5), CLASSES)

    assert table["class"] == ["ant", "bee", "cat"]
    assert table["images"] == [4, 6, 2]
    assert table["precision"][:2] == pytest.approx([3 / 6, 5 / 6])
    assert table["recall"][:2] == pytest.approx([3 / 4, 5 / 6])
    assert table["f1"][:2] == pytest.approx([0.6, 5 / 6])


def test_class_that_is_never_predicted_has_precision_zero() -> None:
    """The division by zero predictions does not result in NaN."""
    table = class_table(Evaluation(0.5, CONFUSION, 1.0, 0.5), CLASSES)

    assert [table[name][2] for name in ("precision", "recall", "f1")] == [0.0, 0.0, 0.0]


def test_perfect_classifier_has_ones_everywhere() -> None:
    """Without mistakes, precision, recall and F1 are 1."""
    table = class_table(Evaluation(0.5, torch.diag(torch.tensor([2, 7, 1])), 1.0, 0.5), CLASSES)

    assert table["precision"] == table["recall"] == table["f1"] == [1.0, 1.0, 1.0]


def test_report_has_every_part_once(cache: CacheRef, storage: Storage, heat: HeatOfPackage) -> None:
    """Tables, figures, event file and model card have the names that the README lists."""
    run = RecordingRun()

    log_report(run, facts_of(cache), COUNTS, storage, heat)  # type: ignore[arg-type]  # a stand-in with the attributes that are used

    assert run.tables.keys() == {"test_classes.json", "test_mistakes.json"}
    assert run.figures.keys() == {
        "test_confusion.png",
        "test_calibration.png",
        "unknown_scores.png",
        "learning_curves.png",
        "test_mistakes.png",
        "train_images.png",
    }
    assert run.folders == {"tensorboard": ["events.out.tfevents.run"]}
    assert "| cat | 3 | 2 |" in run.texts["model_card.md"]
    assert run.description == run.texts["model_card.md"]


def test_report_says_which_characters_no_font_has(
    cache: CacheRef,
    storage: Storage,
    heat: HeatOfPackage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of a class and of the file of a mistake, on the card and in the log."""
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", list)
    monkeypatch.setattr(
        "tasks.report.report.image_files", lambda _manifest, _split, rows, _storage: ["\u7336"] * len(rows)
    )
    facts = facts_of(cache)
    named = facts.manifest.model_copy(update={"classes": ("ant", "\u771f", "cat")})
    run = RecordingRun()

    log_report(run, replace(facts, manifest=named), COUNTS, storage, heat)  # type: ignore[arg-type]  # a stand-in with the attributes that are used

    expected = "The fonts of this machine lack '\u7336', '\u771f': the figures show boxes in their place"
    assert expected in run.texts["model_card.md"]
    assert [line for line in caplog.messages if line.startswith(expected)]


def test_gallery_has_the_pixels_of_the_mistakes(cache: CacheRef, storage: Storage, heat: HeatOfPackage) -> None:
    """The images are rows 5 and 0 of the split test; without a table that names their files, rows are their names."""
    run = RecordingRun()

    log_report(run, facts_of(cache), COUNTS, storage, heat)  # type: ignore[arg-type]  # a stand-in with the attributes that are used

    shown = [axes for axes in run.figures["test_mistakes.png"].axes if axes.images]
    pixels = [axes.images[0].get_array() for axes in shown]
    assert [image[:, :16].tolist() for image in pixels] == [noise(row, 16).tolist() for row in (5, 0)]
    # Beside each image it is once more, under the heat map of its predicted class.
    assert [image.shape for image in pixels] == [(16, 32, 3)] * 2
    assert any(image[:, 16:].tolist() != image[:, :16].tolist() for image in pixels)
    assert run.tables["test_mistakes.json"]["image"] == ["row 5", "row 0"]


def test_without_mistakes_there_is_no_gallery(cache: CacheRef, storage: Storage, heat: HeatOfPackage) -> None:
    """All other parts of the report are logged."""
    run = RecordingRun()

    facts = facts_of(cache, test=evaluation_of(torch.diag(torch.tensor([4, 4, 4])), ()))
    log_report(run, facts, COUNTS, storage, heat)  # type: ignore[arg-type]  # a stand-in with the attributes that are used

    assert run.tables.keys() == {"test_classes.json"}
    assert "test_mistakes.png" not in run.figures
    assert "test_confusion.png" in run.figures
