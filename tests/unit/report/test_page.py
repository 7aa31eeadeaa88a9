"""The parts of a result page: order of the sections, and names that stay whole and literal."""

from tasks.refs import ModelRef
from tasks.report.page import card_with_figures, commands_markdown, mistakes_markdown, named_card

CARD = "# resnet18, 2 classes\n\n## Results\n\nOn 12 test images.\n\n## Weakest classes\n\nNone.\n"


def test_figures_and_commands_come_before_the_long_tables() -> None:
    """The order is: results, next commands, figures, weakest classes; nothing of the card is lost."""
    page = card_with_figures(CARD, "## Which images it gets wrong\n\n![x](data:)", {"serve": "mlflow models serve"})

    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## Results", "## Next commands", "## Which images it gets wrong", "## Weakest classes"]
    assert card_with_figures(CARD, "").replace("\n", "") == CARD.replace("\n", "")


def test_card_of_another_release_is_kept_whole() -> None:
    """A card without the section of the weakest classes has the figures at its end."""
    assert card_with_figures("# A card\n", "figures").split() == ["#", "A", "card", "figures"]


def test_card_of_the_champion_has_its_name_and_version() -> None:
    """They are in the title, and only there."""
    named = named_card(CARD, ModelRef(name="lakevision-photos", version=3, run_id="run"))

    assert named.splitlines()[0] == "# lakevision-photos version 3: resnet18, 2 classes"
    assert named.splitlines()[1:] == CARD.splitlines()[1:]


def test_mistakes_have_whole_file_names_that_stay_literal() -> None:
    """A name of any length is not shortened, and its Markdown has no effect."""
    name = "cat/" + "a long name " * 20 + "[x](http://evil).jpg"
    table = {
        "columns": ["image", "row", "true", "predicted", "probability", "true_probability", "loss"],
        "data": [[name, 4, "cat", "a|b", 0.987, 0.01, 4.6]],
    }
    (row,) = mistakes_markdown(table).splitlines()[2:]
    assert "a long name " * 19 in row
    assert row.startswith("| cat | a\\|b | 0.99 | cat/a long name ")
    assert row.endswith("\\[x\\](http://evil).jpg |")


def test_commands_are_one_line_each_under_their_goal() -> None:
    """They can be copied as a whole."""
    text = commands_markdown({"serve": "mlflow serve", "roll back": "python -m flows.rollback"})
    assert text.splitlines()[4:] == [
        "```sh",
        "# serve",
        "mlflow serve",
        "# roll back",
        "python -m flows.rollback",
        "```",
    ]
