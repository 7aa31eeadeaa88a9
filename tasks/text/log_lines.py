"""Lines of a log: what comes from outside stays on its line, and shows no credentials."""

import logging
from collections.abc import Mapping
from typing import Any

from tasks.credentials import without_credentials
from tasks.text.printable import printable


class _Printable:
    """Stands in a message for a value whose own text has something hidden in it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(self._value)

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _is_plain(text: str) -> bool:
    return printable(text) == text


def _shown(value: Any) -> Any:
    return value if _is_plain(str(value)) and _is_plain(repr(value)) else _Printable(value)


def _formatted(template: str, args: Any) -> str:
    """Return the message of a record; nothing in its arguments begins a line."""
    if not args:
        return printable(template)
    message: str = template % args
    if _is_plain(message):
        return message
    # The line breaks may be the template's own, which stay.
    if isinstance(args, Mapping):
        return str(template % {name: _shown(value) for name, value in args.items()})
    return template % tuple(_shown(value) for value in args)


def _written(record: logging.LogRecord) -> str:
    """Return the message of a record; a mistake in it, often another package's, does not end the code that logs."""
    template = f"a message of type {type(record.msg).__name__}"
    try:
        template = str(record.msg)
        return _formatted(template, record.args)
    except Exception as error:  # A value's own `__str__` may raise anything.
        why = f"{type(error).__name__}: {error}"
        return printable(f"{template} (this line's values could not be written: {why})")


class OneLine(logging.Filter):
    """Escapes what a name or value could do to a log: begin a line, move the cursor, or show itself in another order.

    The line breaks of a message's own format string stay. On a handler it sees the records of every logger.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged, which is always so; write its message anew."""
        # All handlers share the record, and what one filter has escaped is not to be escaped again.
        if not getattr(record, "lakevision_one_line", False):
            record.msg, record.args = without_credentials(_written(record)), ()
            record.lakevision_one_line = True
        return True
