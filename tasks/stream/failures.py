"""Errors of a streaming query as sentences for users."""

import re
from urllib.parse import unquote

from tasks.errors import TableInUse, WrongInput
from tasks.stream.checkpoint import RESTART

GONE = (
    "DELTA_LOG_FILE_NOT_FOUND_FOR_STREAMING_SOURCE",
    "DELTA_MISSING_FILES_UNEXPECTED_VERSION",
    "DELTA_CHANGE_DATA_FILE_NOT_FOUND",
    "DELTA_FILE_NOT_FOUND",
    "DELTA_TRUNCATED_TRANSACTION_LOG",
    "DELTA_VERSIONS_NOT_CONTIGUOUS",
)
"""Conditions of Delta that mean that a part of the log or of the feed was deleted."""

NO_FILE = ("FileNotFoundException", "FAILED_READ_FILE.FILE_NOT_EXIST")


class ColumnsChanged(RuntimeError):
    """Signal that the columns of the table changed while it was read, after which the query has to start again."""


def explain_failure(text: str, path: str, checkpoint: str) -> Exception | None:
    """Return the error that explains why a streaming query failed, or None for another reason.

    Args:
        text: Messages of the query's exception, with those of its causes.
        path: Path or URL of the source.
        checkpoint: Folder of the query's checkpoint.
    """
    folder = path.rstrip("/").rsplit("/", 1)[-1]
    named = text + unquote(text)  # Some messages have the path, others a URI.
    names_source = f"/{folder}/" in named
    # A batch also reads the table of predictions: a failure that names only another log is not about the source.
    logs = set(re.findall("([^/]+)/_delta_log", named))
    is_gone = any(condition in text for condition in GONE) and (not logs or folder in logs)
    if is_gone or (names_source and any(name in text for name in NO_FILE)):
        return WrongInput(
            f"changes of '{path}' that the stream has not read yet were deleted, by VACUUM or by the clean-up of the "
            f"table's log: {RESTART}"
        )
    if "DELTA_MISSING_CHANGE_DATA" in text:
        return WrongInput(
            f"'{path}' had no change data feed for a part of the changes that the stream has not read yet: set "
            f"delta.enableChangeDataFeed to true for the table, and {RESTART}"
        )
    if "DELTA_SCHEMA_CHANGED" in text:
        return ColumnsChanged(path)
    return explain_checkpoint_failure(text, checkpoint)


def explain_checkpoint_failure(text: str, checkpoint: str) -> Exception | None:
    """Return the error that explains why a query cannot continue with its checkpoint, or None for another reason."""
    if "MALFORMED_LOG_FILE" in text:
        return WrongInput(f"the checkpoint '{checkpoint}' of the stream is damaged: {RESTART}")
    if "CONCURRENT_STREAM_LOG_UPDATE" in text:
        return TableInUse(f"another driver runs the same stream, with the checkpoint '{checkpoint}': run again later")
    return None
