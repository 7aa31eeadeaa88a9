"""Exceptions made for a person to read: what was asked for cannot be done, a disk is full, or a server is away."""

from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tasks.credentials import without_credentials
from tasks.printable import printable


def shown(value: object) -> str:
    """Return a value from outside as it may stand in a log line or an error: on one line, without credentials."""
    return printable(without_credentials(str(value)))


class _Sentence(Exception):
    """An exception whose message is one line, whatever name or value from outside is in it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(message))


class OutOfTime(_Sentence, TimeoutError):
    """What a person allowed for it is used up; to try again would take as much once more."""


class WrongInput(_Sentence, ValueError):
    """Input refused before work starts; its one sentence says what was wrong, its value, and the way out.

    Never retried: running again cannot help.
    """


class DiskFull(_Sentence, RuntimeError):
    """Work ended because a disk had no room left; its one sentence says how much is free where.

    Retried, since room may be made; each table is as it was or as it should be, and no half cache is left.
    """


class TrackingAway(_Sentence, RuntimeError):
    """The tracking server does not answer; its one sentence names it.

    Retried, since it may come back; what was to be sent is in the checkpoint of the training, and run again it is sent.
    """


class RunDeleted(_Sentence, RuntimeError):
    """Somebody deleted the MLflow run while it was trained; run again, the training goes on in another one."""


FOR_A_PERSON: tuple[type[Exception], ...] = (WrongInput, DiskFull, TrackingAway, RunDeleted)
"""Errors whose sentence says all: on a terminal they have no traceback, and ranks hand them to their launcher."""


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
