"""Fonts of the figures: a font of the machine draws what matplotlib's own lacks, or a sentence says what it lacks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tasks.report.fonts import drawn_with_fonts


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the machine's fonts, which is empty at first, and forget the fonts that a test adds."""
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: list(map(str, tmp_path.iterdir())))
    before = [*font_manager.fontManager.ttflist]
    yield tmp_path
    font_manager.fontManager.ttflist = before


def test_latin_names_need_no_other_font(installed: Path) -> None:
    """Accents, Greek and Cyrillic letters are in matplotlib's own font."""
    with drawn_with_fonts(["chat noir", "Käfer", "γάτα", "кот"]) as lacking:
        assert lacking == ""


def test_characters_without_a_font_are_named_with_the_way_out(installed: Path) -> None:
    """The first ones are named, in order, and the others are counted; fonts of bitmaps are left out."""
    (installed / "broken.ttf").write_bytes(b"no font")
    with drawn_with_fonts(["猫", "हाथी"]) as lacking:
        assert lacking.startswith("The fonts of this machine lack 'थ', 'ह', 'ा', 'ी', '猫': the figures show boxes")
        assert "fonts-noto-cjk" in lacking


def test_font_of_the_machine_draws_what_the_default_font_lacks(
    installed: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The figure is drawn without a warning about a missing glyph; the next figure has the default font again."""
    own = Path(font_manager.findfont("STIXSizeOneSym"))
    character = chr(_only_in(own)[0])
    shutil.copy(own, installed / "stix.ttf")
    with drawn_with_fonts([f"class {character}"]) as lacking:
        assert lacking == ""
        figure = Figure()
        figure.text(0, 0, f"class {character}")
    FigureCanvasAgg(figure).draw()
    assert not [warning for warning in recwarn if "missing from" in str(warning.message)]


def _only_in(path: Path) -> list[int]:
    default = font_manager.get_font(font_manager.findfont(font_manager.FontProperties())).get_charmap()
    return sorted(font_manager.get_font(str(path)).get_charmap().keys() - default.keys())
