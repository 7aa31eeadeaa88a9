"""Names of registered models: one for each table and the source of its images, where none is given."""

import hashlib
import re

from tasks.config.etl import BUILTIN_DIGITS
from tasks.refs import TableRef
from tasks.storage import Storage

PREFIX = "lakevision"
MOST_LETTERS = 40
"""Letters of a folder's name that become part of a model's."""


def source_name(table: TableRef, storage: Storage) -> str:
    """Return the source of a table as its models' tags have it: the built-in digits are one source in every home.

    An older table of theirs names their folder.
    """
    return BUILTIN_DIGITS if table.source == str(storage.digits) else table.source


def derived_model_name(table: TableRef, storage: Storage) -> str | None:
    """Return the name of the models that are trained from a table, or None where its source is not known.

    The folder's name is for people. The digits behind it tell apart folders of one name, tables that were made anew,
    whose splits may be others, and sources that replaced each other in one table.
    """
    if not table.source:
        return None
    source = source_name(table, storage)
    if source == BUILTIN_DIGITS:
        return f"{PREFIX}-digits"
    if source.startswith(BUILTIN_DIGITS):  # with other splits or labels, which are the same in every home as well
        return f"{PREFIX}-digits-{hashlib.sha256(source.encode()).hexdigest()[:6]}"
    folder = table.source.rstrip("/").rpartition("/")[2].lower()
    readable = re.sub("[^a-z0-9]+", "-", folder)[:MOST_LETTERS].strip("-") or "images"
    mark = hashlib.sha256(f"{table.table_id}|{table.source}".encode()).hexdigest()[:6]
    return f"{PREFIX}-{readable}-{mark}"
