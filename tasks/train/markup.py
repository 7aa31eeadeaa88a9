"""Names, values and tables as Markdown that shows them and does nothing else."""

import re
from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, its cells written as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(name: object) -> str:
    """Return a name from outside as Markdown text that shows it and does nothing else."""
    # An underscore within a word is none of Markdown's: MLflow shows the card as it is written, to be read so.
    marks = r"[\\`*{}\[\]<>|#~$&]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(marks, r"\\\g<0>", " ".join(str(name).split()))


def markdown_code(value: object) -> str:
    """Return a value as code within a table."""
    return f"`{str(value).replace('`', '').replace('|', '/')}`"
