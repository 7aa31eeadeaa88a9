"""The table and the figure of a scaling ladder."""

from typing import TYPE_CHECKING

from tasks.ladder.steps import Ladder, StepResult
from tasks.report.figures import QUIET_COLOUR, VAL_COLOUR, new_figure, png_of
from tasks.report.page import MAX_IMAGE_BYTES, fit_images
from tasks.text.markup import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("step", "images", "test accuracy (95 %)", "time", "images/s", "utilisation", "speed-up", "cost")


def row_of(number: int, step: StepResult) -> list[str]:
    """Return the cells of a step; a step that was left out has the reason in place of figures."""
    name = f"{number}. {step.name}"
    if step.left_out:
        return [f"{name}: left out, since {step.left_out}", *[""] * (len(HEADER) - 1)]
    interval = "" if step.interval is None else " ({:.3f} to {:.3f})".format(*step.interval)
    return [
        name,
        f"{step.images:,}",
        f"{step.accuracy:.3f}{interval}",
        f"{step.seconds:.0f} s",
        "" if step.images_per_second is None else f"{step.images_per_second:,.0f}",
        "" if step.utilisation is None else f"{100 * step.utilisation:.0f} %",
        "" if step.speed_up is None else f"{step.speed_up:.2f}",
        "" if step.cost is None else f"{step.cost:.2f}",
    ]


def ladder_markdown(ladder: Ladder) -> str:
    """Return the ladder as Markdown: the advice, the table and the figure."""
    rows = [row_of(number, step) for number, step in enumerate(ladder.steps, 1)]
    images = fit_images({"Time and accuracy": png_of(draw_ladder(ladder))}, MAX_IMAGE_BYTES)
    return "\n\n".join(
        [
            f"# Next: {ladder.advice}",
            markdown_table(HEADER, rows),
            *(f"![{name}]({uri})" for name, uri in images.items()),
            "The time is that of the training run without the start of its processes. The speed-up compares the time "
            "for one training image with the step before. The utilisation is the share of the loop in which it did not "
            "wait for data.",
        ]
    )


def ladder_text(ladder: Ladder) -> str:
    """Return the ladder as a table for the terminal, and the advice."""
    rows = [list(HEADER), *(row_of(number, step) for number, step in enumerate(ladder.steps, 1))]
    widths = [max(len(row[column]) for row in rows if row[1]) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"next: {ladder.advice}"])


def draw_ladder(ladder: Ladder) -> "Figure":
    """Draw time (bars) and test accuracy with its interval (points) of the steps that were run."""
    ran = [(number, step) for number, step in enumerate(ladder.steps, 1) if not step.left_out]
    figure = new_figure(7.0, 3.6)
    axes = figure.subplots()
    axes.bar([number for number, _step in ran], [step.seconds for _number, step in ran], color=QUIET_COLOUR, width=0.5)
    axes.set(xlabel="step", ylabel="time of training in s", xticks=range(1, len(ladder.steps) + 1))
    right = axes.twinx()
    for number, step in ran:
        right.plot([number] * 2, step.interval or [step.accuracy] * 2, "_-", color=VAL_COLOUR)
        right.plot(number, step.accuracy, "o", color=VAL_COLOUR)
    right.set(ylabel="test accuracy", ylim=(0.0, 1.05))
    return figure
