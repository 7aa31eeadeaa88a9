"""Default names of registered models, derived from a table and the source of its images."""

import hashlib

from tasks.config.etl import BUILTIN_DIGITS
from tasks.paths import readable_name
from tasks.refs import TableRef
from tasks.storage import Storage

PREFIX = "lakevision"
MAX_FOLDER_CHARACTERS = 40
"""Maximum number of characters of the folder's name in the name of a model."""


def source_name(table: TableRef, storage: Storage) -> str:
    """Return the source of a table as in its models' tags: the built-in digits are the same source in every home.

    An older table of the digits has the path of their folder as its source.
    """
    return BUILTIN_DIGITS if table.source == str(storage.digits) else table.source


def derived_model_name(table: TableRef, storage: Storage) -> str | None:
    """Return the name of the models that are trained on a table, or None if its source is unknown.

    The folder's name makes it readable. The suffix distinguishes folders of the same name, tables that were created
    again, possibly with other splits, and sources that replaced each other in one table.
    """
    if not table.source:
        return None
    source = source_name(table, storage)
    if source == BUILTIN_DIGITS:
        return f"{PREFIX}-digits"
    if source.startswith(BUILTIN_DIGITS):  # other splits or labels of the digits, the same in every home as well
        return f"{PREFIX}-digits-{hashlib.sha256(source.encode()).hexdigest()[:6]}"
    suffix = hashlib.sha256(f"{table.table_id}|{table.source}".encode()).hexdigest()[:6]
    return f"{PREFIX}-{readable_name(table.source, MAX_FOLDER_CHARACTERS)}-{suffix}"
