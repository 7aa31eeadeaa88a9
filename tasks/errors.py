"""Exceptions made for a person to read: what was asked for cannot be done, a disk is full, or a server is away."""

from collections.abc import Sequence

from pydantic import ValidationError


class OutOfTime(TimeoutError):
    """What a person allowed for it is used up; to try again would take as much once more."""


class WrongInput(ValueError):
    """Input refused before work starts; its one sentence says what was wrong, its value, and the way out.

    Never retried: running again cannot help.
    """


class DiskFull(RuntimeError):
    """Work ended because a disk had no room left; its one sentence says how much is free where.

    Retried, since room may be made; each table is as it was or as it should be, and no half cache is left.
    """


class TrackingAway(RuntimeError):
    """The tracking server does not answer; its one sentence names it.

    Retried, since it may come back; what was to be sent is in the checkpoint of the training, and run again it is sent.
    """


class RunDeleted(RuntimeError):
    """Somebody deleted the MLflow run while it was trained; run again, the training goes on in another one."""


FOR_A_PERSON: tuple[type[Exception], ...] = (WrongInput, DiskFull, TrackingAway, RunDeleted)
"""Errors whose sentence says all: on a terminal they have no traceback, and ranks hand them to their launcher."""


def listed(shown: Sequence[str], total: int) -> str:
    """Return the first of `total` names as a sentence has them: with the number of those that are not shown."""
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


ALTERNATIVES = ("constrained-", "literal[")
"""What pydantic's names for the alternatives of a setting begin with."""


def explain(error: ValidationError) -> str:
    """Turn pydantic's report into one line a person can act on: field, value, and what it must be."""
    lines: list[str] = []
    told: dict[str, int] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        # Of a setting that takes one thing or another pydantic tells why it is neither: that is one line.
        alternative = bool(parts) and parts[-1].startswith(ALTERNATIVES)
        field = ".".join(parts[:-1] if alternative else parts) or "the configuration"
        message = item["msg"].removeprefix("Value error, ")
        if alternative and field in told:
            lines[told[field]] += f", or {message[0].lower()}{message[1:]}"
            continue
        told[field] = len(lines)
        if item["type"] == "extra_forbidden":
            lines.append(f"{field} is not a setting: remove it or check its spelling")
        elif item["type"] == "missing":
            lines.append(f"{field} is missing: give it a value")
        elif item["type"] == "value_error":
            lines.append(f"{field}: {message}" if item["loc"] else message)
        elif "conf" in item["loc"]:
            lines.append(f"{field}: {message[0].lower()}{message[1:]}")  # a value of Spark's may be a credential
        else:
            lines.append(f"{field} is {item['input']!r}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)
