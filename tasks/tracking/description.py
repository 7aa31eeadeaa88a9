"""Descriptions in MLflow's UI, in Markdown: of a run, and of a version of a registered model."""

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

DESCRIPTION_TAG = MLFLOW_RUN_NOTE

MAX_RUN_DESCRIPTION = 8000
MAX_VERSION_DESCRIPTION = 5000
"""Characters that a column of MLflow's database holds; SQLite takes more, PostgreSQL refuses them."""

CUT_NOTE = "\n\n*Shortened: the whole text is the artifact `model_card.md` of the training run.*\n"


def fit_description(text: str, max_characters: int) -> str:
    """Return a text that fits: whole, or as many of its first chapters as there is room for, and a note.

    A first chapter that does not fit is cut after a line; a line that does not fit is cut within.
    """
    if len(text) <= max_characters:
        return text
    room = max_characters - len(CUT_NOTE)
    # Never inside a table or a fence, of which the rest would be shown as something else.
    end = max(text.rfind("\n## ", 0, room + 1), 0) or max(text.rfind("\n", 0, room + 1), 0) or room
    return text[:end].rstrip() + CUT_NOTE
