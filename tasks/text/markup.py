"""Names, values and tables as Markdown that shows them and does nothing else."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.text.printable import printable


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, its cells written as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(name: object) -> str:
    """Return a name from outside as Markdown text that shows it and does nothing else."""
    # An underscore within a word is none of Markdown's: MLflow shows the card as it is written, to be read so.
    marks = r"[\\`*{}\[\]<>|#~$&]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(marks, r"\\\g<0>", printable(" ".join(str(name).split())))


def markdown_link(text: str, page: str | None) -> str:
    """Return Markdown text with a link to a page, or alone where there is none."""
    return f"{text} (no MLflow UI shows its database)" if page is None else f"[{text}]({page})"


def in_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a Prefect table artifact, whose page renders each text as Markdown, so that names stay names."""
    return {name: markdown_text(value) if isinstance(value, str) else value for name, value in row.items()}


def markdown_code(value: object) -> str:
    """Return a value as code within a table."""
    return f"`{printable(value).replace('`', '').replace('|', '/')}`"


def markdown_fence(text: str, language: str = "") -> str:
    """Return lines as a block of code that nothing within them ends.

    Its fence is longer than any run of backticks within: CommonMark 0.31, section 4.5.
    """
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"
