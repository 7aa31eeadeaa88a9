"""Texts that are too long for a column of MLflow's database."""

from tasks.tracking.description import CUT_NOTE, fit_description

CARD = "# title\n\n## one\n\n| a |\n| --- |\n" + 20 * "| row |\n" + "\n## two\n\n" + 20 * "words\n"


def test_text_that_fits_is_whole() -> None:
    """To the last character."""
    assert fit_description(CARD, len(CARD)) == CARD


def test_chapters_that_do_not_fit_are_left_out_whole() -> None:
    """And a note says where they are."""
    cut = fit_description(CARD, len(CARD) - 1)

    assert cut == CARD[: CARD.index("\n\n## two")] + CUT_NOTE
    assert len(cut) < len(CARD)


def test_text_without_an_end_is_cut_all_the_same() -> None:
    """No description is longer than its column, whatever the text is."""
    for text in ("x" * 1000, "x" * 50 + "\n" + "y" * 1000, "\n## " + "x" * 1000, CARD * 9):
        assert len(fit_description(text, 300)) <= 300
        assert fit_description(text, 300).endswith(CUT_NOTE)
