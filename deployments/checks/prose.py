"""The prose check of `make lint`: plain technical English in docstrings, comments, messages and READMEs.

It finds what a regular expression can find: words that the glossary replaces, docstrings of modules and classes
that do not begin with a noun, and sentences that are too long. Each rule says what to write instead. Ruff holds that a
function's docstring begins with a verb (D401).
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deployments.checks.readme import ROOT, tracked

MAX_WORDS = 30
"""Words of a sentence. The aim is 25; a list of names may take a few more."""

_RATE = r"(batch|class|core|epoch|file|flow|home|image|minute|rank|row|run|second|split|stage|step|table|worker)"
_COUNTED = r"(batches|bytes|epochs|files?|images|lines?|milliseconds|ms|once|rows|seconds|steps|times|twice|GB|MB)"
_OF_TRAINING = (
    r"(batch|cache|code|data|device|epoch|flow|image|job|loop|loss|metric|process|run|script|set|speed|split|stage|step|"
    r"task|time)"
)

RULES: dict[str, str] = {
    r"\bpictures?\b": "image",
    r"\btrainings\b": "training runs",
    rf"\b(a|another|every|each|this|that|same|one) training\b(?! {_OF_TRAINING})": "a training run",
    r"\b(go|goes|going|gone|went) on\b": "resume, continue",
    r"\bask(ed|s)? to leave\b": "interrupt, shut down",
    r"\b(is|are|was|were|be|being|as) no (longer )?(a )?numbers?\b|\bno numbers?\b": "non-finite, NaN",
    r"\bby heart\b": "overfit",
    rf"\b{_COUNTED} an? {_RATE}\b": "per epoch, per step, per rank",
    r"\bpersons?\b|\bwhoever\b|\bsomebody\b|\bsomeone\b": "user",
    r"\btak(e|es|en|ing) (its |their |a |the )?turns?\b|\bto ourselves\b": "exclusive lock, acquire",
    r"\bwhat it (gave|gives|learned|computes|computed)\b": "the name of the thing",
    r"\bSay (whether|that|which|in which|how|where|of)\b": "Return whether ..., Describe ..., Log ...",
    r"\bthat which\b|\bwhat is\b|\bone that\b|\bso that it may\b": "the name of the thing",
    r"\b(is|are|was|were) no (?!longer\b|more\b|such\b)[a-z]+": "is not a ..., has no ...",
}
"""What a text must not have, and what to write instead."""

EXCEPTIONS: dict[str, str] = {
    r"https?://\S+": "an address",
    r"`[^`]*`": "a name of the code",
}
"""What no rule looks at, and why."""

_SQL = re.compile(r"^\s*(SELECT|FROM|WITH|WHERE|CREATE|MERGE|INSERT|UPDATE|COPY|EXPLAIN)\b", re.MULTILINE)

FIRST_WORDS = {"What", "Whoever", "Who", "Whose", "Where", "How", "Whether", "Which", "That"}
"""No docstring begins with one of these."""

VERBS = {
    "Bring", "Bound", "Choose", "Collect", "Compare", "Decide", "Delete", "Determine", "Ensure", "Fetch",
    "Find", "Fit", "Get", "Give", "Hold", "Install", "Keep", "Make", "Open", "Predict", "Put", "Raise",
    "Refuse", "Register", "Remove", "Replace", "Restore", "Return", "Rewrite", "Say", "Send", "Show", "Submit",
    "Take", "Tell", "Turn", "Yield",
}  # fmt: skip
"""First words that tell a module's or class's docstring which does not begin with a noun."""


class Problem(NamedTuple):
    """A place in a text that breaks a rule."""

    path: str
    line: int
    says: str


Described = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _is_noun(node: Described) -> bool:
    """Return whether the docstring is that of a thing: a module, a class or a property."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return True
    return bool({"property", "cached_property"} & {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list})


def first_word_problem(node: Described, docstring: str) -> str | None:
    """Return what is wrong with the first word of a docstring, or None."""
    first = re.split(r"[\s,:;.']", docstring.strip().lstrip("`\"'"), maxsplit=1)[0]
    if first in FIRST_WORDS:
        return f"a docstring begins with '{first}': begin with a verb, or with a noun for a module or class"
    if _is_noun(node) and first in VERBS:
        return f"a module, class or property begins with '{first}': begin with a noun"
    return None


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield docstrings, comments and texts of messages of a Python file, or the paragraphs of another file.

    Each has the number of the line that it begins in.
    """
    text = path.read_text()
    if path.suffix != ".py":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith(("```", "<!--")):
                fenced = not fenced if line.startswith("```") else fenced
                continue
            if not fenced:
                yield number, line
        return
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or _SQL.search(node.value):
            continue
        # Other strings of tests are programs and data.
        if id(node) in docstrings or not path.is_relative_to(ROOT / "tests"):
            yield node.lineno, node.value
    comment: list[str] = []
    began = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            began = began or token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type not in {tokenize.NL, tokenize.NEWLINE} and comment:
            yield began, " ".join(comment)
            comment, began = [], 0


def problems(path: Path) -> Iterator[Problem]:
    """Yield what breaks a rule in a file."""
    name = path.relative_to(ROOT).as_posix()
    for line, text in texts(path):
        looked_at = text
        for pattern in EXCEPTIONS:
            looked_at = re.sub(pattern, "x", looked_at)
        for pattern, instead in RULES.items():
            for found in re.finditer(pattern, looked_at, re.IGNORECASE):
                at = line + looked_at[: found.start()].count("\n")
                yield Problem(name, at, f"'{found[0]}': write {instead}")
        for sentence in re.split(r"(?<=[.:!?])\s+(?=[A-Z`'\"])|\n\s*\n|\n\s*(?=[-*|] )|\n\s*(?=\w+: )", looked_at):
            words = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            if words > MAX_WORDS and "|" not in sentence:
                yield Problem(name, line, f"a sentence of {words} words: make two of it: {sentence.strip()[:60]!r}...")
            if sentence.count(";") > 1 and "|" not in sentence:
                yield Problem(
                    name, line, f"a sentence with {sentence.count(';')} semicolons: {sentence.strip()[:60]!r}..."
                )
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and (says := first_word_problem(node, docstring)):
                    yield Problem(name, getattr(node, "lineno", 1), says)


NOT_CHECKED = {
    "deployments/checks/prose.py": "names the words",
    "tests/unit/test_prose.py": "breaks the rules to test them",
    "tests/benchmarks/LOG.md": "is a record of measurements",
}
"""Files whose prose is not checked, and why."""


def checked_files() -> list[Path]:
    """Return the files whose prose is checked."""
    return [ROOT / path for path in tracked("*.py", "*.md") if path not in NOT_CHECKED]


def main(arguments: list[str]) -> int:
    """Print every problem of the files given, or of all; return 1 where there is one."""
    files = [Path(name).resolve() for name in arguments] or checked_files()
    found = [problem for file in files for problem in problems(file)]
    for path, line, says in found:
        print(f"{path}:{line}: {says}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
