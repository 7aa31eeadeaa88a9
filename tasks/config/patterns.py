r"""Regular expressions from settings: matched by RE2, in time linear in the text, whatever the expression.

They are written as for Python's `re`. What RE2 lacks (lookaround, backreferences) is refused, and what it understands
in another way is translated: its own \d, \w and \s know ASCII alone. Two differences stay: \b knows ASCII alone, and $
does not match before a last line break.
"""

import re
import sys
from functools import cache

import re2

MAX_CHARACTERS = 1000
"""Of an expression; a path has at most 4,096."""

MAX_GROUPS = 100
"""Of an expression; a label needs one."""

MAX_REPEAT = 1000
"""RE2's own bound of {n}; it takes a larger number for plain text."""

MAX_BYTES = 8 << 20
"""Memory for a compiled expression and its automaton, RE2's default."""

_TOKEN = re.compile(r"\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|\{\d*,?\d*\}|\[\^?\]?|.", re.DOTALL)
_UNICODE = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": r"\t-\r\x1c-\x1f\x{85}\p{Z}"}
"""What Python's classes hold, for use within brackets."""


@cache
def _all_but(name: str) -> str:
    r"""Return the ranges of \D, \W or \S, for use within brackets, where RE2 cannot take one class off another."""
    everything = "".join(map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))))
    found = re.finditer(rf"\{name.upper()}+", everything)
    # The surrogates are left out of `everything`: a run over their gap is fine, since no text in UTF-8 has them.
    return "".join(rf"\x{{{ord(run[0][0]):x}}}-\x{{{ord(run[0][-1]):x}}}" for run in found)


def _translate_escape(token: str, in_class: bool) -> str:
    name = token[1:]
    if name[0] in "uU" and len(name) > 1:
        return rf"\x{{{name[1:]}}}"
    if name.lower() in _UNICODE:
        if in_class:
            return _UNICODE[name] if name in _UNICODE else _all_but(name.lower())
        return f"[{'' if name in _UNICODE else '^'}{_UNICODE[name.lower()]}]"
    if name == "Z" and not in_class:
        return r"\z"
    if name == "b" and in_class:
        return r"\x08"
    return name if not name.isascii() else token


def _translate_repeat(token: str) -> str:
    low, comma, high = token[1:-1].partition(",")
    if not low and not comma:
        return token  # {} is plain text in both
    for bound in (low, high):
        if len(bound) > len(str(MAX_REPEAT)) or int(bound or 0) > MAX_REPEAT:
            raise ValueError(f"a repeat of more than {MAX_REPEAT:,} times")
    return f"{{{low or 0}{comma}{high}}}"


def _translate(pattern: str) -> str:
    """Return an expression of Python's as RE2 understands it.

    Raises:
        ValueError: It has a repeat that is too large.
    """
    translated = []
    in_class = False
    for token in _TOKEN.findall(pattern):
        if token.startswith("\\") and len(token) > 1:
            translated.append(_translate_escape(token, in_class))
        elif in_class:
            # A bracket within brackets is plain text; RE2 would take [: for the name of a POSIX class.
            translated.append(token.replace("[", r"\["))
            in_class = not token.endswith("]")
        elif token.startswith("{"):
            translated.append(_translate_repeat(token))
        else:
            in_class = token.startswith("[")
            translated.append(token)
    return "".join(translated)


def _what_is_wrong(pattern: str, said: str) -> str:
    if re.search(r"\(\?(=|!|<=|<!)", pattern):
        return "has lookaround, which is not supported: match the text around the label without it"
    if re.search(r"\\[1-9]|\(\?P=|\(\?\(", pattern):
        return "has a backreference, which is not supported: match the text without it"
    if re.search(r"\(\?>|[*+?}]\+", pattern):
        return "has a possessive or atomic group, which is not supported: leave it out, nothing ever backtracks here"
    if "too large" in said or "repetition size" in said:
        return "has repeats that are too large or go from high to low: repeat less"
    return f"is no regular expression ({said}): mend it"


@cache
def compile_pattern(pattern: str) -> re2._Regexp:
    """Compile a regular expression in Python's syntax, to be searched in UTF-8.

    Raises:
        ValueError: It is too long or too large, is no regular expression, or has what takes backtracking.
    """
    if len(pattern) > MAX_CHARACTERS:
        raise ValueError(f"has {len(pattern):,} characters: write at most {MAX_CHARACTERS:,}")
    options = re2.Options()
    options.max_mem = MAX_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(_translate(pattern), options)
    except re2.error as error:
        said = error.args[0] if error.args else b""
        said = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        raise ValueError(_what_is_wrong(pattern, said)) from None
    except ValueError as error:
        raise ValueError(f"has {error}: repeat less") from None
    if compiled.groups > MAX_GROUPS:
        raise ValueError(f"has {compiled.groups:,} groups: use at most {MAX_GROUPS}")
    return compiled


def find_group(compiled: re2._Regexp, text: str, group: int) -> str | None:
    """Return what a group of the first match has found in a text, or None where nothing is found.

    A byte of a name that is no Unicode matches nothing.
    """
    # In bytes, since the wrapper counts the characters of a text before every group.
    found = compiled.search(text.encode(errors="surrogateescape"))
    taken = None if found is None else found[group]
    return None if taken is None else taken.decode(errors="surrogateescape")
