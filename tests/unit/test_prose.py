"""Prose of the project: words of the glossary, first words of docstrings, and lengths of sentences."""

import shutil
from pathlib import Path

import pytest

from deployments.checks import prose
from tests.builders.processes import ROOT


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="needs git and a checkout, to know which files are tracked",
)
@pytest.mark.long  # `make test` begins with the same check in `make lint`.
def test_docstrings_comments_messages_and_readmes_are_plain_english() -> None:
    """Every rule of `deployments.checks.prose` holds in every file; a problem says what to write instead."""
    files = prose.checked_files()
    assert {ROOT / "README.md", ROOT / "flows" / "pipeline.py"} <= set(files)

    assert [problem for file in files for problem in prose.problems(file)] == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('"""What a step has."""\n', "begins with 'What'"),
        ('"""Keep the tables small."""\n', "a module, class or property begins with 'Keep'"),
        ("# Every picture once.\n", "write image"),
        ("x = 1  # one line a file\n", "write per epoch, per step, per rank"),
        ('x = "the training goes on"\n', "write resume, continue"),
        ('x = f"{1} is no file"\n', "write is not a ..., has no ..."),
        ('"""Tables: a; b; c."""\n', "2 semicolons"),
        (f'"""Tables {"and tables " * 20}."""\n', "a sentence of 41 words"),
    ],
)
def test_a_text_that_breaks_a_rule_is_found(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its file, and what to write instead."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(source)

    found = list(prose.problems(file))

    assert {problem.path for problem in found} == {"module.py"}
    assert any(says in problem.says for problem in found), found


def test_plain_english_has_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a name of the code in backticks, whatever it says, and a test's sentence."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(
        '"""Delta tables: one commit per stage."""\n\n\n'
        'def test_f():\n    """A table has `pictures`, and `what is` it."""\n'
    )
    assert list(prose.problems(file)) == []
