"""Lines of a log: what comes from outside stays on its line, and shows no credentials."""

import logging
from numbers import Number
from typing import Any

from tasks.credentials import without_credentials
from tasks.printable import printable


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, Number) else printable(value)


class OneLine(logging.Filter):
    """Escapes what a name or value could do to a log: begin a line, move the cursor, or show itself in another order.

    The line breaks of a message's own format string stay. On a handler it sees the records of every logger.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged, which is always so; write its message anew."""
        if isinstance(record.args, dict):
            args: Any = {name: _shown(value) for name, value in record.args.items()}
        else:
            args = tuple(_shown(value) for value in record.args or ())
        message = str(record.msg) % args if args else printable(record.msg)
        record.msg, record.args = without_credentials(message), ()
        return True
