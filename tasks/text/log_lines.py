"""Lines of logs: several under a title, and a filter that keeps external values on one and removes credentials."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.credentials import without_credentials
from tasks.text.markup import printable, text_of


class _Printable:
    """Substitute for an argument of a log message whose own text has hidden characters."""

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
    """Return the message of a record, without line breaks from its arguments."""
    if not args:
        return printable(template)
    message: str = template % args
    if _is_plain(message):
        return message
    # Line breaks of the template itself are kept.
    if isinstance(args, Mapping):
        return str(template % {name: _shown(value) for name, value in args.items()})
    return template % tuple(_shown(value) for value in args)


def _message(record: logging.LogRecord) -> str:
    """Return the message of a record; a formatting error in it, often another package's, is not raised."""
    template = f"a message of type {type(record.msg).__name__}"
    try:
        template = str(record.msg)
        return _formatted(template, record.args)
    except Exception as error:  # A value's own `__str__` may raise anything.
        reason = f"{type(error).__name__}: {text_of(error)}"
        return printable(f"{template} (this line's values could not be written: {reason})")


def message_of(record: logging.LogRecord) -> str:
    """Return the message of a record as logging does, or with the formatting error where one is raised."""
    try:
        return record.getMessage()
    except Exception:  # As in `_message`.
        return _message(record)


def log_lines(logger: logging.Logger, title: str, lines: Sequence[str]) -> None:
    """Log a title and lines below it."""
    form = "\n%s" * len(lines)  # line breaks in the format: those within arguments are escaped
    logger.info(f"{title}{form}", *lines)


class SingleLineFilter(logging.Filter):
    """Filter that escapes characters which start a line, move the cursor, or change the order of the text.

    Line breaks of a message's own format string are kept. Attached to a handler, it sees the records of all loggers.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the message of a record; always return True."""
        # All handlers share the record, so that an escaped message must not be escaped again.
        if not getattr(record, "lakevision_one_line", False):
            record.msg, record.args = without_credentials(_message(record)), ()
            record.lakevision_one_line = True
        return True
