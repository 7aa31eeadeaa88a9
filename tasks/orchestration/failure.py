"""Explanation of failed runs: state message, artifact `what-went-wrong`, and logs without noise."""

import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tasks.credentials import without_credentials
from tasks.errors import UserError, error_record, restored_error
from tasks.text.log_lines import message_of
from tasks.text.markup import markdown_code, markdown_text, text_of

ARTIFACT_KEY = "what-went-wrong"

_OWN_CODE = Path(__file__).resolve().parents[2]
_OWN_PACKAGES = ("flows", "tasks")

ERROR_LABEL = "lakevision.error"
"""Label of a flow run with the user error that ended it, from which the run that submitted it restores the error."""


def error_labels(error: UserError) -> dict[str, bool | int | float | str]:
    """Return the labels of the flow run that an error ends."""
    return {ERROR_LABEL: json.dumps(error_record(error))}


def noted_error(labels: Mapping[str, object], message: str) -> UserError | None:
    """Return the user error that ended a flow run, or None if the run ended otherwise.

    Args:
        labels: Labels of the run.
        message: Message of its state, which begins with the sentence of the error that ended it. The label may have
            been left by an earlier start of the run.
    """
    if ERROR_LABEL not in labels:
        return None
    error = restored_error(json.loads(str(labels[ERROR_LABEL])))
    return error if message.startswith(str(error)) else None


def state_message(error: Exception) -> str:
    """Return the message of a failed run's state: the error's sentence, followed by its type in parentheses."""
    return f"{without_credentials(text_of(error))} ({type(error).__name__})"


def raised_at(error: BaseException) -> str | None:
    """Return file, line and function of the innermost frame in this project's code, or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_OWN_CODE) and (own := file.relative_to(_OWN_CODE)).parts[0] in _OWN_PACKAGES:
            return f"{own}, line {frame.lineno}, in {frame.name}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that its traceback shows as causes or contexts."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        pending += [found.__cause__, None if found.__suppress_context__ else found.__context__]
        if isinstance(found, BaseExceptionGroup):
            pending += found.exceptions


def _has_text(error: Exception) -> bool:
    # Prefect, which asks for the text, breaks at an error that raises then.
    try:
        str(error)
    except Exception:  # As in `text_of`.
        return False
    return True


def without_secrets(error: Exception) -> Exception:
    """Return the error, or a replacement if its text or traceback shows credentials, or if it has no text.

    The replacement is a RuntimeError with the type, text and traceback of the error, but without the credentials and
    without its causes.
    """
    shown = [text for found in _chain(error) for text in (text_of(found), *getattr(found, "__notes__", ()))]
    if _has_text(error) and all(without_credentials(text) == text for text in shown):
        return error
    clean = RuntimeError(f"{type(error).__name__}: {without_credentials(text_of(error))}")
    for note in getattr(error, "__notes__", ()):
        clean.add_note(without_credentials(note))
    clean.__suppress_context__ = True
    return clean.with_traceback(error.__traceback__)


def _list_of_advice(error: UserError) -> list[str]:
    """Return setting and advice as list items: two items for a single error, one item for each of several."""
    found: list[str] = []
    for each in error.problems or [error]:
        entries = [f"Setting: {markdown_code(each.setting)}"] if each.setting else []
        entries += [f"Way out: {markdown_text(without_credentials(each.way_out))}"] if each.way_out else []
        found += [". ".join(entries)] if error.problems and entries else entries
    return [f"- {entry}" for entry in found]


def failure_markdown(error: Exception, log: str | None, children: Sequence[str] = ()) -> str:
    """Return the Markdown that explains a failed run.

    Args:
        error: The error that ended the run.
        log: URL of the run's page, or None without a UI.
        children: Markdown about what caused the error: submitted runs that failed, files that cannot be used.
    """
    sentence = without_credentials(text_of(error))
    lines = ["# What went wrong", ""]
    if isinstance(error, UserError):
        lines += [f"**{markdown_text(sentence)}**", "", *_list_of_advice(error)]
    else:
        lines += [f"**{markdown_text(type(error).__name__)}: {markdown_text(sentence)}**", ""]
        if place := raised_at(error):
            lines.append(f"- Raised in: {markdown_code(place)}")
        lines.append("- Way out: this error was not expected; the log below has its traceback and the lines before it")
    lines += [f"- {child}" for child in children]
    lines.append(f"- Full log: [logs of this run]({log})" if log else "- Full log: where this run was started")
    return "\n".join(lines) + "\n"


class EngineLogFilter(logging.Filter):
    """Filter that removes credentials and the tracebacks of user errors from the logs of Prefect's engine.

    The engine logs the traceback of every error that ends a run, even if the run's state has a message of its own.
    """

    def __init__(self, is_being_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Create the filter.

        Args:
            is_being_cancelled: Returns whether the current run is being cancelled; called for a task or flow that was
                ended by a signal.
        """
        super().__init__()
        self.is_being_cancelled = is_being_cancelled

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged, after removing credentials and superfluous tracebacks from it."""
        error = record.exc_info[1] if record.exc_info else None
        # The engine raises the error that a state holds outside of any `except`: then the record has no error.
        is_explained = error is None or isinstance(error, UserError)
        if record.exc_info and is_explained:
            record.exc_info = record.exc_text = None
        elif isinstance(error, Exception) and (clean := without_secrets(error)) is not error:
            record.exc_info, record.exc_text = (type(clean), clean, clean.__traceback__), None
        message = without_credentials(message_of(record))
        record.msg, record.args = message, ()
        if message.startswith("Finished in state Cancelled"):
            record.levelno, record.levelname = logging.INFO, "INFO"  # the task engine logs it as an error
        if message.startswith(_CRASHED) and "termination signal" in message and self.is_being_cancelled():
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg = "Ended by a signal, since the flow run is being cancelled"
        return not (record.levelno >= logging.ERROR and is_explained and message.startswith(_REPEATS))


_REPEATS = ("Engine execution exited", "Execution of flow run", "Task run failed with state", "Parameter validation")
"""First words of log lines in which the engine repeats that a run failed, after the error's sentence was logged."""

_CRASHED = ("Crash detected!", "Finished in state Crashed")
"""First words of log lines in which the engine reports that a signal ended a task or a flow."""

ENGINE_LOG_FILTER = EngineLogFilter()
"""The only instance: a logger does not add the same filter twice."""

FILTERED_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine", "prefect.flows")


def shorten_logs(is_being_cancelled: Callable[[], bool]) -> None:
    """Add the filter to the loggers of Prefect's runs and engine in this process.

    Args:
        is_being_cancelled: As for `EngineLogFilter`.
    """
    ENGINE_LOG_FILTER.is_being_cancelled = is_being_cancelled
    for name in FILTERED_LOGGERS:
        logging.getLogger(name).addFilter(ENGINE_LOG_FILTER)
