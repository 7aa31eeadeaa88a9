"""The prose check of `make lint`: plain technical English in docstrings, comments, messages and READMEs.

It finds what a regular expression can find: words that the project's glossary replaces, docstrings that do not begin
with a verb or a noun, and sentences that are too long. Each rule says what to write instead.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

MAX_WORDS = 30
"""Words of a sentence. The aim is 25; a list of names may take a few more."""

RATES = r"(epoch|step|rank|image|batch|file|row|core|run|stage|flow|home|table|class|second|minute|home|split|worker)"

RULES: dict[str, str] = {
    r"\bpictures?\b": "image",
    r"\btrainings\b": "training runs",
    r"\b(a|another|every|each|this|that|same|one|exactly the same) training\b(?! (run|set|loop|step|data|cache|image|loss|"
    r"split|metric|time|device|stage|phase|code|process|setting|epoch|flow|task|batch|speed|job|script))": "a training run",
    r"\b(go|goes|going|gone|went) on\b": "resume, continue",
    r"\bask(ed|s)? to leave\b": "interrupt, shut down",
    r"\b(is|are|was|were|be|being|as) no (longer )?(a )?numbers?\b|\bno numbers?\b": "non-finite, NaN",
    r"\bby heart\b": "overfit",
    rf"\b(images|steps|times|bytes|seconds|milliseconds|lines?|rows|files?|epochs|batches|once|twice|GB|MB|ms) an? {RATES}\b":
        "per epoch, per step, per rank",
    r"\bpersons?\b|\bwhoever\b|\bsomebody\b|\bsomeone\b": "user",
    r"\btak(e|es|en|ing) (its |their |a |the )?turns?\b|\bto ourselves\b": "exclusive lock, acquire",
    r"\bwhat it (gave|gives|learned|computes|computed)\b": "name the thing",
    r"\bSay (whether|that|which|in which|how|where|of)\b": "Return whether ..., Describe ..., Log ...",
    r"\bthat which\b|\bwhat is\b|\bone that\b|\bso that it may\b": "name the thing",
    r"\b(is|are|was|were) no (?!longer\b|more\b|such\b)[a-z]+": "is not a ..., has no ...",
}  # fmt: skip
"""What a text must not have, and what to write instead."""

EXCEPTIONS: dict[str, str] = {
    r"https?://\S+": "an address",
    r"`[^`]*`": "a name of the code",
}
"""What no rule looks at, and why."""

FIRST_WORDS = {"What", "Whoever", "Who", "Whose", "Where", "How", "Whether", "Which", "That"}
"""No docstring begins with one of these."""

NOUNS_TOO = {
    "Access", "Batch", "Build", "Cache", "Check", "Commit", "Count", "Cut", "Display", "Draw", "Export", "File", "Figure",
    "Graph", "Import", "Label", "List", "Load", "Lock", "Log", "Merge", "Name", "Note", "Order", "Place", "Plan", "Point",
    "Promise", "Query", "Rank", "Read", "Reason", "Record", "Report", "Request", "Result", "Return", "Run", "Sample", "Schedule",
    "Search", "Set", "Shape", "Share", "Sort", "Split", "Stage", "Start", "State", "Step", "Stop", "Store", "Test",
    "Time", "Train", "Update", "Use", "Watch", "Weight", "Work", "Write",
}  # fmt: skip
"""Verbs that are nouns as well: a module or class may begin with them."""

ARTICLES = {"A", "An", "The", "All", "Any", "Both", "Each", "Every", "Its", "It", "No", "None", "One", "Of", "By", "With", "Without",
            "And", "As", "Also", "Even", "For", "From", "In", "Into", "Not", "On", "Only", "So", "To", "Two", "Where",
            "While", "When", "If", "There", "This", "These", "Those", "True", "False", "Nothing", "Something"}  # fmt: skip
"""First words that tell a docstring which does not begin with a verb."""


class Problem(NamedTuple):
    """A place in a text that breaks a rule."""

    path: str
    line: int
    says: str


class Text(NamedTuple):
    """A piece of prose, with the line that it begins in."""

    line: int
    text: str


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(one).split("(")[0].rpartition(".")[2] for one in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def _is_test(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.name.startswith("test_") or any("fixture" in ast.unparse(one) for one in node.decorator_list)


def first_word_problem(node: ast.AST, docstring: str) -> str | None:
    """Return what is wrong with the first word of a docstring, or None."""
    first = re.split(r"[\s,:;.'’]", docstring.strip().lstrip("`\"'"), maxsplit=1)[0]
    if first in FIRST_WORDS:
        return f"a docstring begins with '{first}': begin with a verb, or with a noun for a module or class"
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if (
        is_function
        and not _is_property(node)
        and not _is_test(node)
        and (first in ARTICLES or re.fullmatch(r"[A-Z]\w+s", first))
    ):
        third = first.endswith("s") and first not in {"Process", "Pass", "Address", "Discuss", "Express", "Access"}
        if first in ARTICLES or third:
            return f"a function's docstring begins with '{first}': begin with a verb, as 'Return' or 'Raise'"
    return None


def texts(path: Path) -> Iterator[Text]:
    """Yield docstrings, comments and texts of messages of a Python file, or the paragraphs of another file."""
    text = path.read_text()
    if path.suffix != ".py":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith(("```", "<!--")):
                fenced = not fenced if line.startswith("```") else fenced
                continue
            if not fenced:
                yield Text(number, line)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, node.value)
    comment: list[str] = []
    began = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            began = began or token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type not in {tokenize.NL, tokenize.NEWLINE} and comment:
            yield Text(began, " ".join(comment))
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


def checked_files() -> list[Path]:
    """Return the files whose prose is checked."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard", "--", "*.py", "*.md"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [
        ROOT / path
        for path in sorted(listed)
        if path and (ROOT / path).exists() and path not in {"deployments/prose.py", "tests/benchmarks/LOG.md"}
    ]


def main(arguments: list[str]) -> int:
    """Print every problem of the files given, or of all; return 1 where there is one."""
    files = [Path(name).resolve() for name in arguments] or checked_files()
    found = [problem for file in files for problem in problems(file)]
    for path, line, says in found:
        print(f"{path}:{line}: {says}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
