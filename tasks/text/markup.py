"""Escaping of external names and values: control and invisible characters, and the marks of Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: line breaks, and ESC, which starts terminal commands
    "\u2028\u2029"  # line and paragraph separator
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, which change the order of a name
    "\u200b-\u200d\u2060\ufeff"  # zero width: makes different names look the same
    "\ud800-\udfff]"  # bytes of a file name that are not valid Unicode, which streams cannot encode
)


def text_of(value: object) -> str:
    """Return the text of an external value; an error of py4j asks its JVM for it, and raises where that is gone."""
    try:
        return str(value)
    except Exception as error:  # Any, since the code of the value is another package's.
        return f"{type(value).__name__} without a text ({type(error).__name__})"


def printable(text: object) -> str:
    r"""Return a text with each control character and invisible character replaced by its escape (\x1b).

    A text without such characters is returned unchanged, so that the function is idempotent.
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text_of(text))


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
