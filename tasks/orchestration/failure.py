"""Why a run failed, as a user reads it: the state's message, the artifact `what-went-wrong`, and logs without noise."""

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
"""What may be a setting in its group, as distributed.num_ranks; a file's name and a function look alike."""

_FIRST = re.compile(r"(?:config\.)?([a-z]\w*(?:\.\w+)*)(?=:| is | has | and | are )")
"""What may be a setting at the beginning of a sentence, where a name needs no group: source, table_version."""


@cache
def _settings() -> frozenset[str]:
    """Return the names of all settings: those of a flow, those of its groups, and those in its form's first screen."""
    runs = [model for model in all_models() if issubclass(model, Run)]
    short = {name for run in runs for name in run.first}
    return frozenset(short.union(*(_names(run) for run in runs)))


def _names(model: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        found.add(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _names(field.annotation, f"{prefix}{name}.")
    return found


def _as_setting(name: str) -> str | None:
    """Return a setting without the name of a flow's parameter; also one within a setting, as train.fine_tune.0."""
    parts = name.removeprefix("config.").split(".")
    known = any(".".join(parts[:length]) in _settings() for length in range(min(2, len(parts)), len(parts) + 1))
    return ".".join(parts) if known else None


def state_message(error: Exception) -> str:
    """Return the message of a failed run's state: the sentence first, and the kind of the error at its end.

    The kind is what a run on another machine is told by (`tasks.errors.parse_user_error`).
    """
    return f"{without_credentials(str(error))} ({type(error).__name__})"


def _unquoted(sentence: str) -> str:
    """Return a sentence with its quoted values blanked out; positions stay those of the sentence."""
    return re.sub(r"'[^']*'", lambda quoted: "'" * len(quoted[0]), sentence)


def _first_setting(sentence: str) -> str | None:
    """Return the setting that a sentence begins with, or None."""
    found = _FIRST.match(sentence)
    setting = _as_setting(found[1]) if found else None
    if found is None or setting is None:
        return None
    # What is wrong between settings of one group is said of the group: config.train: freeze_backbone is ...
    within = _FIRST.match(sentence, found.end() + 2)
    return f"{setting}.{within[1]}" if within and f"{setting}.{within[1]}" in _settings() else setting


def named_setting(sentence: str) -> str | None:
    """Return the first setting that a sentence names, or None."""
    unquoted = _unquoted(sentence)
    if first := _first_setting(unquoted):
        return first
    return next(filter(None, map(_as_setting, _DOTTED.findall(unquoted))), None)


def single_errors(sentence: str) -> list[str]:
    """Return the errors that a sentence is made of (`tasks.errors.explain`), each of which begins with its setting."""
    ends = [found.start() for found in re.finditer("; ", _unquoted(sentence))]
    begins = [0, *(end + 2 for end in ends)]
    parts = [sentence[begin:end] for begin, end in zip(begins, [*ends, len(sentence)], strict=True)]
    return parts if all(_first_setting(part) for part in parts) else [sentence]


def way_out(sentence: str) -> str | None:
    """Return what a sentence advises: what follows its last colon outside quotes, or None."""
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
    """Yield an error and those that a traceback shows with it."""
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
    """Return an unexpected error as it is, or another one in its place where text or traceback show credentials.

    The other one has its kind, its place and its text without them, and nothing of its causes.
    """
    shown = [text for found in _chain(error) for text in (str(found), *getattr(found, "__notes__", ()))]
    if all(without_credentials(text) == text for text in shown):
        return error
    clean = RuntimeError(f"{type(error).__name__}: {without_credentials(str(error))}")
    for note in getattr(error, "__notes__", ()):
        clean.add_note(without_credentials(note))
    clean.__suppress_context__ = True
    return clean.with_traceback(error.__traceback__)


def _settings_and_ways_out(errors: Sequence[str]) -> list[str]:
    """Return what is to be changed as entries of a list: two for one error, and one for each of several."""
    found: list[str] = []
    for error in errors:
        setting, advice = named_setting(error), way_out(error)
        entries = [f"Setting: {markdown_code(setting)}"] if setting else []
        entries += [f"Way out: {markdown_text(advice)}"] if advice else []
        found += entries if len(errors) == 1 else [". ".join(entries)]
    return [f"- {entry}" for entry in found]


def what_went_wrong(error: Exception, log: str | None, children: Sequence[str] = ()) -> str:
    """Return the Markdown that explains a failed run.

    Args:
        error: What ended the run.
        log: URL of the run's page, or None where there is no UI.
        children: Markdown about the submitted runs that failed first.
    """
    sentence = without_credentials(str(error))
    lines = ["# What went wrong", ""]
    if isinstance(error, UserError):
        lines += [f"**{markdown_text(sentence)}**", ""]
        lines += _settings_and_ways_out(single_errors(sentence))
    else:
        lines += [f"**{markdown_text(type(error).__name__)}: {markdown_text(sentence)}**", ""]
        if place := raised_at(error):
            lines.append(f"- Raised in: {markdown_code(place)}")
        lines.append("- Way out: this error was not expected; the log below has its traceback and what came before it")
    lines += [f"- {child}" for child in children]
    lines.append(f"- Full log: [logs of this run]({log})" if log else "- Full log: where this run was started")
    return "\n".join(lines) + "\n"


class OneSentence(logging.Filter):
    """Keeps credentials, and the traceback of errors that one sentence explains, out of the logs of Prefect's engine.

    The engine logs the traceback of whatever ends a run, also where the run's state has its own message.
    """

    def __init__(self, is_being_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Make the filter.

        Args:
            is_being_cancelled: Returns whether the current run is; asked where a signal ended a task or a flow.
        """
        super().__init__()
        self.is_being_cancelled = is_being_cancelled

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; remove from it what is not to be seen."""
        error = record.exc_info[1] if record.exc_info else None
        # The engine raises the error that a state holds outside of any `except`: then there is none to show.
        told = error is None or isinstance(error, UserError)
        if record.exc_info and told:
            record.exc_info = record.exc_text = None
        elif isinstance(error, Exception) and (clean := without_secrets(error)) is not error:
            record.exc_info, record.exc_text = (type(clean), clean, clean.__traceback__), None
        message = without_credentials(record.getMessage())
        record.msg, record.args = message, ()
        if message.startswith("Finished in state Cancelled"):
            record.levelno, record.levelname = logging.INFO, "INFO"  # the engine of a task takes it for an error
        if message.startswith(_CRASHED) and "termination signal" in message and self.is_being_cancelled():
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg = "Ended by a signal, since the flow run is being cancelled"
        return not (record.levelno >= logging.ERROR and told and message.startswith(_REPEATS))


_REPEATS = ("Engine execution exited", "Execution of flow run", "Task run failed with state", "Parameter validation")
"""How lines begin with which the engine says again that a run failed, after its sentence was logged."""

_CRASHED = ("Crash detected!", "Finished in state Crashed")
"""How lines begin with which the engine says that a signal ended a task or a flow."""

ONE_SENTENCE = OneSentence()
"""The one filter: a logger that has it already does not take it twice."""

FILTERED_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine", "prefect.flows")


def shorten_logs(is_being_cancelled: Callable[[], bool]) -> None:
    """Let the loggers of Prefect's runs and engine drop such tracebacks, in this process.

    Args:
        is_being_cancelled: As `OneSentence` takes it.
    """
    ONE_SENTENCE.is_being_cancelled = is_being_cancelled
    for name in FILTERED_LOGGERS:
        logging.getLogger(name).addFilter(ONE_SENTENCE)
