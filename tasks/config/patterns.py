r"""Regular expressions from settings, matched by RE2 in time linear in the text.

They use the syntax of Python's `re`. Constructs that RE2 lacks (lookaround, backreferences) are refused. Constructs
that RE2 interprets differently are translated: its \d, \w and \s match ASCII only. Two differences remain: \b considers
ASCII only, and $ does not match before a trailing line break.
"""

import re
import sys
from functools import cache

import re2

from tasks.errors import WrongInput

MAX_CHARACTERS = 1000
"""Maximum length of an expression; a path has at most 4,096 characters."""

MAX_GROUPS = 100
"""Maximum number of groups in an expression; a label needs one."""

MAX_REPEAT = 1000
"""RE2's bound of n in {n}; it treats a larger number as plain text."""

MAX_BYTES = 8 << 20
"""Memory for a compiled expression and its automaton, in bytes; RE2's default."""

_TOKEN = re.compile(r"\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|\{\d*,?\d*\}|\[\^?\]?|.", re.DOTALL)
_UNICODE = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": r"\t-\r\x1c-\x1f\x{85}\p{Z}"}
"""Contents of Python's character classes, for use within brackets."""


@cache
def _all_but(name: str) -> str:
    r"""Return the ranges of \D, \W or \S, for use within brackets, where RE2 cannot subtract a class."""
    everything = "".join(map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))))
    found = re.finditer(rf"\{name.upper()}+", everything)
    # `everything` omits the surrogates. A range across that gap is harmless, since UTF-8 text has none.
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


def translate(pattern: str) -> str:
    """Translate an expression from Python's syntax to RE2's.

    Raises:
        ValueError: A repeat is larger than MAX_REPEAT.
    """
    translated = []
    in_class = False
    for token in _TOKEN.findall(pattern):
        if token.startswith("\\") and len(token) > 1:
            translated.append(_translate_escape(token, in_class))
        elif in_class:
            # A bracket within brackets is plain text, but RE2 would parse [: as the start of a POSIX class name.
            translated.append(token.replace("[", r"\["))
            in_class = not token.endswith("]")
        elif token.startswith("{"):
            translated.append(_translate_repeat(token))
        else:
            in_class = token.startswith("[")
            translated.append(token)
    return "".join(translated)


def _diagnosis(pattern: str, message: str) -> WrongInput:
    if re.search(r"\(\?(=|!|<=|<!)", pattern):
        return WrongInput(
            "has lookaround, which is not supported", way_out="match the text around the label without it"
        )
    if re.search(r"\\[1-9]|\(\?P=|\(\?\(", pattern):
        return WrongInput("has a backreference, which is not supported", way_out="match the text without it")
    if re.search(r"\(\?>|[*+?}]\+", pattern):
        advice = "leave it out, since RE2 never backtracks"
        return WrongInput("has a possessive or atomic group, which is not supported", way_out=advice)
    if "too large" in message or "repetition size" in message:
        return WrongInput("has repeats that are too large or go from high to low", way_out="repeat less")
    return WrongInput(f"is not a regular expression ({message})", way_out="correct it")


@cache
def compile_pattern(pattern: str) -> re2._Regexp:
    """Compile a regular expression in Python's syntax, for searching in UTF-8 text.

    Raises:
        WrongInput: It is too long or too large, is not a regular expression, or requires backtracking.
    """
    if len(pattern) > MAX_CHARACTERS:
        raise WrongInput(f"has {len(pattern):,} characters", way_out=f"write at most {MAX_CHARACTERS:,}")
    options = re2.Options()
    options.max_mem = MAX_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(translate(pattern), options)
    except re2.error as error:
        raise _diagnosis(pattern, error.args[0].decode(errors="replace")) from None
    except ValueError as error:
        raise WrongInput(f"has {error}", way_out="repeat less") from None
    if compiled.groups > MAX_GROUPS:
        raise WrongInput(f"has {compiled.groups:,} groups", way_out=f"use at most {MAX_GROUPS}")
    return compiled


def find_group(compiled: re2._Regexp, text: str, group: int) -> str | None:
    """Return the text of a group in the first match, or None if the expression or the group does not match.

    A byte of a file name that is not valid UTF-8 matches nothing.
    """
    # Searched as bytes: for a str, the wrapper counts the characters before every group.
    found = compiled.search(text.encode(errors="surrogateescape"))
    captured = None if found is None else found[group]
    return None if captured is None else captured.decode(errors="surrogateescape")
