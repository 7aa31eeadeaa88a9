"""Errors made for users: each message is one sentence that says what was wrong and how to continue."""

import re
from collections.abc import Callable, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tasks.credentials import without_credentials
from tasks.text.printable import printable


def shown(value: object) -> str:
    """Return a value from outside as it may stand in a log line or an error: on one line, without credentials."""
    return printable(without_credentials(str(value)))


class UserError(Exception):
    """An error made for users: its message is one line, whatever name or value from outside is in it.

    A terminal shows the message without a traceback, and ranks and submitted runs hand it to their launcher.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(message))


class NotRetried(UserError):
    """An error that a retry cannot mend: Prefect fails the run at once."""


class OutOfTime(NotRetried, TimeoutError):
    """A time limit that a user has set is exceeded; a retry would take as long again."""


class WrongInput(NotRetried, ValueError):
    """Input refused before work starts; its sentence says what was wrong, its value, and the way out."""


class Diverged(WrongInput):
    """A loss, gradient or metric is non-finite; the same settings would lead there again.

    Attributes:
        rows: Rows of the split `train` in the batch of the step; empty if no single step caused it.
    """

    def __init__(self, message: str, rows: list[int] | None = None) -> None:
        super().__init__(message)
        self.rows = rows or []

    def naming(self, name: Callable[[list[int]], str]) -> "Diverged":
        """Return the same error with the images of its batch in the message, if it has a batch."""
        return Diverged(f"{self}; its images: {name(self.rows)}") if self.rows else self


class SubmittedRunCancelled(WrongInput):
    """A user cancelled a submitted run; its submitter does not start it again."""


class DiskFull(UserError, RuntimeError):
    """Work ended because a disk had no room left; its one sentence says how much is free where.

    Retried, since room may be made; each table is as it was or as it should be, and no half cache is left.
    """


class TrackingAway(UserError, RuntimeError):
    """The tracking server does not answer; its one sentence names it.

    Retried, since it may come back; what was to be sent is in the checkpoint of the training, and run again it is sent.
    """


class RunDeleted(UserError, RuntimeError):
    """Somebody deleted the MLflow run while it was trained; run again, the training goes on in another one."""


USER_ERRORS: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (Diverged, OutOfTime, WrongInput, DiskFull, TrackingAway, RunDeleted)
}
"""Errors that a rank or a submitted run may end with, by name; a subclass comes before its base."""

_NAMED_ERROR = re.compile(rf"(.*) \(({'|'.join(USER_ERRORS)})\)", re.DOTALL)
"""Message of a state as `tasks.orchestration.failure.state_message` writes it: the sentence, then the error's name."""


def parse_user_error(message: str) -> UserError | None:
    """Return the user error that a submitted run ended with, or None if its state's message names none."""
    found = _NAMED_ERROR.fullmatch(message)
    return None if found is None else USER_ERRORS[found[2]](found[1])


def user_error_name(error: UserError) -> str:
    """Return the name of the first entry of `USER_ERRORS` that the error is an instance of."""
    return next(name for name, kind in USER_ERRORS.items() if isinstance(error, kind))


def listed(shown: Sequence[str], total: int) -> str:
    """Return the first of `total` names as a sentence has them: with the number of those that are not shown."""
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


ALTERNATIVES = ("constrained-", "literal[")
"""What pydantic's names for the alternatives of a setting begin with."""

MOST_SHOWN = 200
"""Characters of a wrong value that are shown."""

MOST_LISTED = 10
"""Values of a wrong list that are shown."""


def _value(given: object) -> str:
    """Return a wrong value as a sentence shows it: of a group its kind alone, which may hold anything."""
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 10**MOST_SHOWN:
        return "a number of more than 200 digits"  # Python refuses to write one of more than 4,300
    if given is None or isinstance(given, (bool, int, float)):
        return repr(given)
    if isinstance(given, str):
        text = without_credentials(given)
        return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")
    if (
        isinstance(given, list)
        and len(given) <= MOST_LISTED
        and not any(isinstance(each, (list, dict)) for each in given)
    ):
        return f"[{', '.join(map(_value, given))}]"
    kinds: dict[type, str] = {dict: "a group of settings", list: "a list"}
    return kinds.get(type(given), f"a value of type {type(given).__name__}")


def _sentence(item: ErrorDetails, field: str) -> str:
    """Return what one entry of pydantic's report says."""
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{field} is not a setting: remove it or check its spelling"
    if item["type"] == "missing":
        return f"{field} is missing: give it a value"
    if item["type"] == "value_error":
        return f"{field}: {message}" if item["loc"] else message
    lowered = f"{message[:1].lower()}{message[1:]}"
    if "conf" in item["loc"]:
        return f"{field}: {lowered}"  # a value of Spark's may be a credential
    return f"{field} is {_value(item['input'])}: {lowered}"


def explain(error: ValidationError) -> str:
    """Turn pydantic's report into one line a person can act on: field, value, and what it must be.

    Credentials are left out, and control characters are escaped.
    """
    lines: list[str] = []
    told: dict[str, int] = {}
    for item in error.errors(include_url=False, include_context=False):
        parts = [str(part) for part in item["loc"]]
        # Of a setting that takes one thing or another pydantic tells why it is neither: that is one line.
        alternative = bool(parts) and parts[-1].startswith(ALTERNATIVES)
        field = ".".join(parts[:-1] if alternative else parts) or "the configuration"
        if alternative and field in told:
            message = item["msg"]
            lines[told[field]] += f", or {message[:1].lower()}{message[1:]}"
            continue
        told[field] = len(lines)
        lines.append(_sentence(item, field))
    return shown("; ".join(lines))
