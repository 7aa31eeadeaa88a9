"""Tests of descriptions that are too long for a column of MLflow's database."""

from tasks.tracking.models import CUT_NOTE, fit_description

CARD = "# title\n\n## one\n\n| a |\n| --- |\n" + 20 * "| row |\n" + "\n## two\n\n" + 20 * "words\n"


def test_text_that_fits_is_unchanged() -> None:
    """A text of exactly the maximum length is returned as it is."""
    assert fit_description(CARD, len(CARD)) == CARD


def test_sections_that_do_not_fit_are_left_out() -> None:
    """The text is cut before a section, and ends with a note that names the full text."""
    cut = fit_description(CARD, len(CARD) - 1)

    assert cut == CARD[: CARD.index("\n\n## two")] + CUT_NOTE
    assert len(cut) < len(CARD)


def test_text_without_sections_or_line_breaks_is_cut() -> None:
    """The result is never longer than the maximum, whatever the text."""
    for text in ("x" * 1000, "x" * 50 + "\n" + "y" * 1000, "\n## " + "x" * 1000, CARD * 9):
        assert len(fit_description(text, 300)) <= 300
        assert fit_description(text, 300).endswith(CUT_NOTE)
