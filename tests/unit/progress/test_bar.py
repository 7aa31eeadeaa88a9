"""Tests of the progress bars on a terminal."""

import io
import sys

import pytest
from rich.console import Console
from rich.theme import Theme

from tasks.progress.bar import progress_bars
from tasks.progress.count import EpochProgress, counted


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_terminal_shows_a_bar_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar has the number of images done, also with a theme without styles for bars."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    bare = Console(stderr=True, theme=Theme({"log.info_level": "cyan"}, inherit=False))  # as Prefect's is
    with progress_bars(bare), counted("etl", 1500):
        pass
    assert "etl" in terminal.getvalue()
    assert "1,500 of 1,500 images" in terminal.getvalue()


def test_training_run_has_a_bar_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar has the number of epochs trained and the last validation accuracy."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bars(Console(stderr=True)):
        epochs = EpochProgress("train", 20)
        epochs.update({"epoch": 4, "max_epochs": 20, "val_accuracy": 0.5})
        epochs.end()
    shown = terminal.getvalue()
    assert "train-epochs" in shown
    assert "4 of 4 epochs, val accuracy 0.5000" in shown


def test_file_or_pipe_gets_no_progress_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written if stderr is not a terminal."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with progress_bars(Console(stderr=True)), counted("etl", 1500):
        pass
    assert file.getvalue() == ""
    assert capsys.readouterr().out == ""
