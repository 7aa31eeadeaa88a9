"""Explanation of failed runs: state message, artifact `what-went-wrong`, and logs without noise."""

import logging
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from tasks.config.frozen import all_models
from tasks.config.run import Run
from tasks.credentials import without_credentials
from tasks.errors import UserError
from tasks.text.markup import markdown_code, markdown_text

ARTIFACT_KEY = "what-went-wrong"

_OWN_CODE = Path(__file__).resolve().parents[2]
_OWN_PACKAGES = ("flows", "tasks")

_DOTTED = re.compile(r"(?<![\w./'])[a-z]\w*(?:\.\w+)+(?![\w/.]*[/(])(?!\.\w)")
"""Candidate for a setting in its group, such as distributed.num_ranks; names of files and functions look alike."""

_FIRST = re.compile(r"(?:config\.)?([a-z]\w*(?:\.\w+)*)(?=:| is | has | and | are )")
"""Candidate for a setting at the start of a sentence, where a name needs no group: source, table_version."""


@cache
def _settings() -> frozenset[str]:
    """Return the names of all settings: of flows, of their groups, and on the first screen of their forms."""
    runs = [model for model in all_models() if issubclass(model, Run)]
    short = {name for run in runs for name in run.first_screen}
    return frozenset(short.union(*(_names(run) for run in runs)))


def _names(model: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        found.add(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _names(field.annotation, f"{prefix}{name}.")
    return found


def _as_setting(name: str) -> str | None:
    """Return a setting, or an item of one as train.fine_tune.0, without the prefix `config`; else None."""
    parts = name.removeprefix("config.").split(".")
    known = any(".".join(parts[:length]) in _settings() for length in range(min(2, len(parts)), len(parts) + 1))
    return ".".join(parts) if known else None


def state_message(error: Exception) -> str:
    """Return the message of a failed run's state: the error's sentence, followed by its type in parentheses.

    By the type, a parent run on another machine restores the error (`tasks.errors.parse_user_error`).
    """
    return f"{without_credentials(str(error))} ({type(error).__name__})"


def _unquoted(sentence: str) -> str:
    """Return a sentence of the same length in which quoted values are blanked out."""
    # An apostrophe within or after a word begins no quotation.
    return re.sub(r"(?<!\w)'[^']*'", lambda quoted: "'" * len(quoted[0]), sentence)


def _first_setting(sentence: str) -> str | None:
    """Return the setting that a sentence begins with, or None."""
    found = _FIRST.match(sentence)
    setting = _as_setting(found[1]) if found else None
    if found is None or setting is None:
        return None
    # An error between settings of one group names the group first: config.train: freeze_backbone is ...
    within = _FIRST.match(sentence, found.end() + 2)
    return f"{setting}.{within[1]}" if within and f"{setting}.{within[1]}" in _settings() else setting


def named_setting(sentence: str) -> str | None:
    """Return the first setting that a sentence names, or None."""
    unquoted = _unquoted(sentence)
    if first := _first_setting(unquoted):
        return first
    return next(filter(None, map(_as_setting, _DOTTED.findall(unquoted))), None)


def single_errors(sentence: str) -> list[str]:
    """Return the errors that `tasks.errors.explain` joined in a sentence, each of which begins with its setting."""
    ends = [found.start() for found in re.finditer("; ", _unquoted(sentence))]
    begins = [0, *(end + 2 for end in ends)]
    parts = [sentence[begin:end] for begin, end in zip(begins, [*ends, len(sentence)], strict=True)]
    return parts if all(_first_setting(part) for part in parts) else [sentence]


def way_out(sentence: str) -> str | None:
    """Return the advice in a sentence, which is the text after the last colon outside quotes, or None."""
    position = _unquoted(sentence).rfind(": ")
    return sentence[position + 2 :].strip() if position >= 0 else None


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


def without_secrets(error: Exception) -> Exception:
    """Return the error, or a replacement if its text or traceback shows credentials.

    The replacement is a RuntimeError with the type, text and traceback of the error, but without the credentials and
    without its causes.
    """
    shown = [text for found in _chain(error) for text in (str(found), *getattr(found, "__notes__", ()))]
    if all(without_credentials(text) == text for text in shown):
        return error
    clean = RuntimeError(f"{type(error).__name__}: {without_credentials(str(error))}")
    for note in getattr(error, "__notes__", ()):
        clean.add_note(without_credentials(note))
    clean.__suppress_context__ = True
    return clean.with_traceback(error.__traceback__)


def _list_of_advice(errors: Sequence[str]) -> list[str]:
    """Return setting and advice as list items: two items for a single error, one item for each of several."""
    found: list[str] = []
    for error in errors:
        setting, advice = named_setting(error), way_out(error)
        entries = [f"Setting: {markdown_code(setting)}"] if setting else []
        entries += [f"Way out: {markdown_text(advice)}"] if advice else []
        found += entries if len(errors) == 1 else [". ".join(entries)]
    return [f"- {entry}" for entry in found]


def failure_markdown(error: Exception, log: str | None, children: Sequence[str] = ()) -> str:
    """Return the Markdown that explains a failed run.

    Args:
        error: The error that ended the run.
        log: URL of the run's page, or None without a UI.
        children: Markdown about submitted runs whose failure caused the error.
    """
    sentence = without_credentials(str(error))
    lines = ["# What went wrong", ""]
    if isinstance(error, UserError):
        lines += [f"**{markdown_text(sentence)}**", ""]
        if error.setting or error.way_out:
            lines += [f"- Setting: {markdown_code(error.setting)}"] if error.setting else []
            lines += [f"- Way out: {markdown_text(without_credentials(error.way_out))}"] if error.way_out else []
        else:
            lines += _list_of_advice(single_errors(sentence))
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
        message = without_credentials(record.getMessage())
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
