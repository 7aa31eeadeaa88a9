"""Why a run failed, as a user reads it: the state's message, the artifact `what-went-wrong`, and logs without noise."""

import logging
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from tasks.credentials import without_credentials
from tasks.errors import FOR_A_PERSON, OutOfTime
from tasks.markup import markdown_code, markdown_text

EXPLAINED: tuple[type[Exception], ...] = (*FOR_A_PERSON, OutOfTime)
"""Errors whose one sentence says all: they need no traceback."""

ARTIFACT_KEY = "what-went-wrong"

_OWN_CODE = Path(__file__).resolve().parents[2]
_OWN_PACKAGES = ("flows", "tasks")

_SETTING = re.compile(r"(?<![\w./'])[a-z]+(?:\.[a-z]+(?:_[a-z0-9]+)*)+(?![\w/.]*[/(])(?!\.\w)")
"""A setting as sentences name it: a group, then fields, as in distributed.num_ranks."""


def state_message(error: Exception) -> str:
    """Return the message of a failed run's state: the sentence first, and the kind of the error at its end.

    The kind is what a run on another machine is told by (`tasks.pool.ending.told_by`).
    """
    return f"{without_credentials(str(error))} ({type(error).__name__})"


def named_setting(sentence: str) -> str | None:
    """Return the first setting that a sentence names, or None."""
    found = _SETTING.search(re.sub(r"'[^']*'", "''", sentence))
    return found[0] if found else None


def way_out(sentence: str) -> str | None:
    """Return what a sentence advises: what follows its last colon outside quotes, or None."""
    # Quoted values keep their length, so that positions stay those of the sentence.
    unquoted = re.sub(r"'[^']*'", lambda quoted: "'" * len(quoted[0]), sentence)
    position = unquoted.rfind(": ")
    return sentence[position + 2 :].strip() if position >= 0 else None


def raised_at(error: BaseException) -> str | None:
    """Return file, line and function of the innermost frame in this project's code, or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_OWN_CODE) and (own := file.relative_to(_OWN_CODE)).parts[0] in _OWN_PACKAGES:
            return f"{own}, line {frame.lineno}, in {frame.name}"
    return None


def what_went_wrong(error: Exception, log: str | None, children: Sequence[str] = ()) -> str:
    """Return the Markdown that explains a failed run.

    Args:
        error: What ended the run.
        log: URL of the run's page, or None where there is no UI.
        children: Markdown about the submitted runs that failed first.
    """
    sentence = without_credentials(str(error))
    lines = ["# What went wrong", ""]
    if isinstance(error, EXPLAINED):
        lines += [f"**{markdown_text(sentence)}**", ""]
        if setting := named_setting(sentence):
            lines.append(f"- Setting: {markdown_code(setting)}")
        if advice := way_out(sentence):
            lines.append(f"- Way out: {markdown_text(advice)}")
    else:
        lines += [f"**{markdown_text(type(error).__name__)}: {markdown_text(sentence)}**", ""]
        if place := raised_at(error):
            lines.append(f"- Raised in: {markdown_code(place)}")
        lines.append("- Way out: this error was not expected; the log below has its traceback and what came before it")
    lines += [f"- {child}" for child in children]
    lines.append(f"- Full log: [logs of this run]({log})" if log else "- Full log: where this run was started")
    return "\n".join(lines) + "\n"


def mark_as_told(error: Exception) -> None:
    """Remember that the sentence of an error was logged."""
    error.lakevision_told = True  # type: ignore[attr-defined]


def was_told(error: Exception) -> bool:
    """Return whether the sentence of an error was logged."""
    return getattr(error, "lakevision_told", False)


class OneSentence(logging.Filter):
    """Keeps credentials, and the traceback of errors that one sentence explains, out of the logs of Prefect's engine.

    The engine logs the traceback of whatever ends a run, also where the run's state has its own message.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; remove from it what is not to be seen."""
        error = record.exc_info[1] if record.exc_info else None
        # The engine raises the error that a state holds outside of any `except`: then there is none to show.
        told = error is None or isinstance(error, EXPLAINED)
        if record.exc_info and told:
            record.exc_info = record.exc_text = None
        message = without_credentials(record.getMessage())
        record.msg, record.args = message, ()
        if message.startswith("Finished in state Cancelled"):
            record.levelno, record.levelname = logging.INFO, "INFO"  # the engine of a task takes it for an error
        if message.startswith("Engine execution exited") and isinstance(error, EXPLAINED) and not was_told(error):
            record.msg = without_credentials(str(error))  # of a run that ended before its function was called
            return True
        return not (record.levelno >= logging.ERROR and told and message.startswith(_REPEATS))


_REPEATS = ("Engine execution exited", "Execution of flow run", "Task run failed with state", "Parameter validation")
"""How lines begin with which the engine says again that a run failed, after its sentence was logged."""

ONE_SENTENCE = OneSentence()
"""The one filter: a logger that has it already does not take it twice."""

FILTERED_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine", "prefect.flows")


def shorten_logs() -> None:
    """Let the loggers of Prefect's runs and engine drop such tracebacks, in this process."""
    for name in FILTERED_LOGGERS:
        logging.getLogger(name).addFilter(ONE_SENTENCE)
