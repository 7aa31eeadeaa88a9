"""Markdown descriptions of runs and registered versions in MLflow's UI, cut to the maximum length."""

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

DESCRIPTION_TAG = MLFLOW_RUN_NOTE

MAX_RUN_DESCRIPTION = 8000
MAX_VERSION_DESCRIPTION = 5000
"""Column sizes of MLflow's database in characters; SQLite accepts longer texts, PostgreSQL rejects them."""

CUT_NOTE = "\n\n*Shortened: the whole text is the artifact `model_card.md` of the training run.*\n"


def fit_description(text: str, max_characters: int) -> str:
    """Return the text, or as many of its first sections as fit, followed by a note.

    If the first section does not fit, it is cut at a line break; if its first line does not fit, within that line.
    """
    if len(text) <= max_characters:
        return text
    room = max_characters - len(CUT_NOTE)
    # Not within a table or a code fence, whose remainder would be rendered as something else.
    end = max(text.rfind("\n## ", 0, room + 1), 0) or max(text.rfind("\n", 0, room + 1), 0) or room
    return text[:end].rstrip() + CUT_NOTE
