"""The figures of a comparison as Markdown."""

from tasks.registry.comparison import chance_gain
from tasks.registry.decision import Comparison
from tasks.registry.judged import judged_text
from tasks.text.markup import markdown_table, markdown_text

NUM_CLASSES = 50
"""Maximum number of classes in the artifact."""


def comparison_markdown(found: Comparison) -> str:
    """Return the figures of both models on the same images, and their recall by class, as Markdown."""
    figures = [
        ["accuracy", accuracy_text(found.challenger_accuracy), accuracy_text(found.champion_accuracy)],
        ["macro F1", accuracy_text(found.challenger_macro_f1), accuracy_text(found.champion_macro_f1)],
        ["images that only this model classifies correctly", str(found.only_challenger), str(found.only_champion)],
    ]
    if found.challenger_milliseconds is not None and found.champion_milliseconds is not None:
        figures.append(
            ["ms for an image", f"{found.challenger_milliseconds:.1f}", f"{found.champion_milliseconds:.1f}"]
        )
    # The classes that lost most come first: they are what a reader looks for.
    by_change = sorted(found.classes, key=lambda one: one.challenger - one.champion)
    classes = [
        [markdown_text(one.label), str(one.images), accuracy_text(one.challenger), accuracy_text(one.champion)]
        for one in by_change[:NUM_CLASSES]
    ]
    judged = judged_text(found.num_judged)
    differing = found.only_challenger + found.only_champion
    omitted = len(by_change) - len(classes)
    of = "" if found.table_version is None else f" of version {found.table_version} of the table"
    return "\n".join(
        [
            "",
            f"### On the same {found.images} images{of}",
            "",
            markdown_table(["", "best run", "champion"], figures),
            "",
            f"McNemar's exact test: p = {found.p_value:.3g}. {judged[:1].upper()}{judged[1:]}: a gain of at "
            f"most {chance_gain(differing, found.images, found.num_judged):.4f} may be chance.",
            "",
            markdown_table(["class", "images", "recall, best run", "recall, champion"], classes),
            *(["", f"{omitted} more classes, which lost less, are not shown."] if omitted > 0 else []),
            "",
        ]
    )


def accuracy_text(value: float | None) -> str:
    """Return a fraction as text with four digits."""
    return "none" if value is None else f"{value:.4f}"
