"""Escaping of control characters and invisible characters in external names and values."""

import re

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: line breaks, and ESC, which starts terminal commands
    "\u2028\u2029"  # line and paragraph separator
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, which change the order of a name
    "\u200b-\u200d\u2060\ufeff"  # zero width: makes different names look the same
    "\ud800-\udfff]"  # bytes of a file name that are not valid Unicode, which streams cannot encode
)


def printable(text: object) -> str:
    r"""Return a text with each control character and invisible character replaced by its escape (\x1b).

    A text without such characters is returned unchanged, so that the function is idempotent.
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
