"""Names and values from outside, as a log line, an error or an artifact may show them: on one line, in plain sight."""

import re

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: line breaks, and ESC, which begins a terminal's commands
    "\u2028\u2029"  # line and paragraph separator
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, which show a name in another order
    "\u200b-\u200d\u2060\ufeff"  # no width: two names that look the same
    "\ud800-\udfff]"  # bytes of a file name that are no Unicode, which no stream can encode
)


def printable(text: object) -> str:
    r"""Return a text with each character that is not seen, or that acts on what shows it, as its escape (\x1b).

    A text without such characters stays as it is, so what was escaped already is not changed.
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
