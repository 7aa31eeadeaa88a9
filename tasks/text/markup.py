"""Escaping of names, values and tables for Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.text.printable import printable


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without escaping its cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(name: object) -> str:
    """Return an external name as Markdown text that renders literally."""
    # An underscore within a word needs no escape, which would impair the source text that MLflow shows.
    marks = r"[\\`*{}\[\]<>|#~$&]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(marks, r"\\\g<0>", printable(" ".join(str(name).split())))


def markdown_link(text: str, page: str | None) -> str:
    """Return Markdown text with a link to a page, or with a note if `page` is None."""
    return f"{text} (no MLflow UI shows its database)" if page is None else f"[{text}]({page})"


def in_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a Prefect table artifact with its strings escaped, since the page renders them as Markdown."""
    return {name: markdown_text(value) if isinstance(value, str) else value for name, value in row.items()}


def markdown_code(value: object) -> str:
    """Return a value as inline code for a table cell."""
    return f"`{printable(value).replace('`', '').replace('|', '/')}`"


def markdown_fence(text: str, language: str = "") -> str:
    """Return lines as a fenced code block.

    The fence is longer than any run of backticks in the lines, so that they cannot end it: CommonMark 0.31, section
    4.5.
    """
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"
