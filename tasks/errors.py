"""Errors for users, whose one-line messages state what was wrong and how to continue."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tasks.credentials import without_credentials
from tasks.text.markup import printable, text_of


def loggable(value: object) -> str:
    """Return an external value as a string for log lines and errors: on one line, without credentials."""
    return printable(without_credentials(text_of(value)))


class UserError(Exception):
    """An error for users, whose message is one line even if it contains external names or values.

    A terminal shows the message without a traceback, and ranks and submitted runs pass it to their launcher.

    Attributes:
        setting: The setting that the error is about, with its group, such as `train.max_epochs`; may be empty.
        way_out: Advice how to continue, which ends the message after a colon; may be empty.
        problems: The errors that the message joins if it reports several settings, else empty.
        was_retried: Whether the run that raised it has used its own retries; its submitter does not repeat them.
    """

    problems: Sequence["UserError"] = ()
    was_retried: bool = False

    def __init__(self, message: object = "", *, setting: str = "", way_out: str = "") -> None:
        super().__init__(loggable(f"{message}: {way_out}" if way_out else message))
        self.setting = setting
        self.way_out = loggable(way_out)

    @property
    def cause(self) -> str:
        """The message without its way out."""
        return str(self).removesuffix(f": {self.way_out}")

    @classmethod
    def complete(cls, message: object, *, setting: str = "", way_out: str) -> Self:
        """Return an error whose message ends with its way out already."""
        error = cls(message, setting=setting)
        error.way_out = loggable(way_out)
        return error


class NotRetried(UserError):
    """An error that a retry cannot resolve: Prefect fails the run at once."""


class TimeLimitExceeded(NotRetried, TimeoutError):
    """A time limit set by the user is exceeded; a retry would take as long again."""


class WrongInput(NotRetried, ValueError):
    """Input refused before work starts; the message states what was wrong, its value, and the way out."""


class Diverged(WrongInput):
    """A loss, gradient or metric is non-finite, and would be again with the same settings.

    Attributes:
        rows: Rows of the split `train` in the batch of the step; empty if no single step caused it.
    """

    def __init__(self, message: str, rows: list[int] | None = None, *, setting: str = "", way_out: str = "") -> None:
        super().__init__(message, setting=setting, way_out=way_out)
        self.rows = rows or []

    def with_image_names(self, name: Callable[[list[int]], str]) -> "Diverged":
        """Return the same error with the names of its batch's images in the message, if it has a batch."""
        if not self.rows:
            return self
        message = f"{self}; its images: {name(self.rows)}"
        return Diverged.complete(message, setting=self.setting, way_out=self.way_out)


class SubmittedRunCancelled(WrongInput):
    """A submitted run was cancelled by a user; its submitter does not start it again."""


class SubmittedRunFailed(NotRetried, RuntimeError):
    """A submitted run failed with an error that has no class here, after the retries of its own stages."""


class SubmittedRunLost(UserError, RuntimeError):
    """A submitted run crashed, or its worker or machine is gone. Retried: it is submitted again, and resumes."""


class DiskFull(UserError, RuntimeError):
    """A disk is full; the message states the free space of each location.

    Retried, since space may be freed. Each table is at its old or its new version, and no partial cache is left.
    """


class OutOfMemory(NotRetried, RuntimeError):
    """A training process ran out of memory, and would again with the same settings; the message names one to change."""


class QueryTooLarge(NotRetried, RuntimeError):
    """A query on names and hashes needs more memory than its limit, and would again."""


class TrackingUnavailable(UserError, RuntimeError):
    """The tracking server does not answer; the message names it.

    Retried, since it may come back. Unsent data is in the checkpoint of the training run, and is sent when that is run
    again.
    """


class AccessDenied(NotRetried, RuntimeError):
    """The tracking server denies access during a run, as to an expired token; the message names it.

    Not WrongInput: what could not be read is not wrong, and nothing is decided without it.
    """


class ClusterUnavailable(UserError, RuntimeError):
    """The Spark master does not answer; the message names it. Retried, since it may come back."""


class SourceUnavailable(UserError, RuntimeError):
    """Files of a source cannot be looked at, which does not mean that they are gone; the message names the path.

    Retried, since a disk or network share may come back.
    """


class TableInUse(UserError, RuntimeError):
    """Another driver writes to a table that can have one writer only; the message names it. Retried, since it ends."""


class LockLost(UserError, RuntimeError):
    """A lock that is held by a lease was not renewed, so that another driver may write; the message names the place.

    Retried, before anything was committed: the next attempt acquires the lock again.
    """


class RunDeleted(UserError, RuntimeError):
    """The MLflow run was deleted during training; run again, the training run resumes in a new MLflow run."""


class RankStalled(UserError, RuntimeError):
    """A rank was stopped or hung, and all ranks were ended; the message names rank and step.

    Retried, since it may not happen again: training resumes from the last checkpoint.
    """


class HostLost(UserError, RuntimeError):
    """A host does not answer, or no longer, and all ranks were ended; the message names host and ranks.

    Retried, since it may come back: training resumes from the last checkpoint.

    Attributes:
        host: Name of the host; empty in the error of a submitted run.
        ranks: Numbers of the ranks on it.
    """

    def __init__(
        self, message: object = "", host: str = "", ranks: Sequence[int] = (), *, setting: str = "", way_out: str = ""
    ) -> None:
        super().__init__(message, setting=setting, way_out=way_out)
        self.host = host
        self.ranks = tuple(ranks)


USER_ERRORS: dict[str, type[UserError]] = {
    kind.__name__: kind
    for kind in (
        Diverged,
        TimeLimitExceeded,
        WrongInput,
        SubmittedRunFailed,
        SubmittedRunLost,
        DiskFull,
        OutOfMemory,
        QueryTooLarge,
        TrackingUnavailable,
        AccessDenied,
        ClusterUnavailable,
        SourceUnavailable,
        TableInUse,
        LockLost,
        RunDeleted,
        RankStalled,
        HostLost,
    )
}
"""Errors that a rank or a submitted run may end with, by name; subclasses come before their base class."""


def is_retried(error: BaseException) -> bool:
    """Return whether the stage that raised an error is retried: the only place that decides it.

    Errors without a class here may be transient: a lost executor, a server that restarts.
    """
    # Also of an error that is not a user's: ranks that were started again after each of several losses.
    return not (isinstance(error, NotRetried) or getattr(error, "was_retried", False))


def error_record(error: UserError) -> dict[str, Any]:
    """Return an error as JSON values, from which another process restores it."""
    kind = next(name for name, kind in USER_ERRORS.items() if isinstance(error, kind))
    record = {"kind": kind, "message": str(error), "setting": error.setting, "way_out": error.way_out}
    return record | {"problems": [error_record(problem) for problem in error.problems]}


def restored_error(record: Mapping[str, Any]) -> UserError:
    """Return the error of a record of `error_record`; its class is the first of USER_ERRORS that it belongs to.

    A class that only another release has becomes SubmittedRunFailed.
    """
    kind = USER_ERRORS.get(record["kind"], SubmittedRunFailed)
    error = kind.complete(record["message"], setting=record["setting"], way_out=record["way_out"])
    error.problems = [restored_error(problem) for problem in record.get("problems", ())]
    return error


def join_names(shown: Sequence[str], total: int) -> str:
    """Join the first names of `total` for a sentence, followed by the number of the others."""
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def similar_names(given: str, known: Iterable[str], otherwise: str) -> str:
    """Return the advice for an unknown name: up to three similar known ones, or `otherwise` if none is similar."""
    close = difflib.get_close_matches(given, sorted(known), n=3, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


ALTERNATIVES = ("constrained-", "literal[")
"""Prefixes of pydantic's names for the alternatives of a setting."""

MAX_SHOWN = 200
"""Maximum length of an invalid value in a message, in characters."""

MAX_LISTED = 10
"""Maximum number of values of an invalid list in a message."""


def _value(given: object) -> str:
    """Return an invalid value for a message; of a group, which may hold anything, only the kind."""
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 10**MAX_SHOWN:
        return "a number of more than 200 digits"  # Python refuses to write one of more than 4,300
    if given is None or isinstance(given, (bool, int, float)):
        return repr(given)
    if isinstance(given, str):
        text = without_credentials(given)
        return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
    if (
        isinstance(given, list)
        and len(given) <= MAX_LISTED
        and not any(isinstance(each, (list, dict)) for each in given)
    ):
        return f"[{', '.join(map(_value, given))}]"
    kinds: dict[type, str] = {dict: "a group of settings", list: "a list"}
    return kinds.get(type(given), f"a value of type {type(given).__name__}")


def _problem(item: ErrorDetails, place: Sequence[str]) -> WrongInput:
    """Return one entry of pydantic's report, about the setting at `place`, as an error."""
    field = ".".join(place) or "the configuration"
    setting = field.removeprefix("config.") if place else ""  # `config` is the parameter of every flow
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return WrongInput(f"{field} is not a setting", setting=setting, way_out="remove it or check its spelling")
    if item["type"] == "missing":
        return WrongInput(f"{field} is missing", setting=setting, way_out="give it a value")
    if item["type"] == "value_error":
        error = item["ctx"]["error"]  # of a validator; one across settings names the first of them
        named = ".".join(filter(None, ("" if setting == "config" else setting, getattr(error, "setting", ""))))
        text = f"{field}: {message}" if place else message
        return WrongInput.complete(text, setting=named, way_out=getattr(error, "way_out", ""))
    lowered = f"{message[:1].lower()}{message[1:]}"
    if "conf" in place:  # the value of a Spark setting may be a credential
        return WrongInput(field, setting=setting, way_out=lowered)
    return WrongInput(f"{field} is {_value(item['input'])}", setting=setting, way_out=lowered)


def invalid_settings(error: ValidationError) -> WrongInput:
    """Return pydantic's report as an error for users: its message has field, value, and what it must be, in one line.

    Credentials are omitted, and control characters are escaped.
    """
    problems: dict[tuple[str, ...], WrongInput] = {}
    for item in error.errors(include_url=False):
        place = tuple(map(str, item["loc"]))
        # For a setting with alternatives, pydantic reports an error per alternative: they share one line.
        if place and place[-1].startswith(ALTERNATIVES):
            place = place[:-1]
        if before := problems.get(place):
            message = item["msg"]
            other = f", or {message[:1].lower()}{message[1:]}"
            problems[place] = WrongInput.complete(
                f"{before}{other}", setting=before.setting, way_out=f"{before.way_out}{other}"
            )
        else:
            problems[place] = _problem(item, place)
    found = list(problems.values())
    if len(found) == 1:
        return found[0]
    joined = WrongInput("; ".join(map(str, found)))
    joined.problems = found
    return joined


def explain(error: ValidationError) -> str:
    """Return the message of `invalid_settings`."""
    return str(invalid_settings(error))
