"""The commands that the project's files name: each runs, wherever its module is."""

import re
import runpy
import sys

import pytest

from tests.builders.processes import ROOT

COMMAND = re.compile(r"-m[ \",]+((?:deployments|flows)(?:\.\w+)+)")

NO_OPTIONS = {
    "deployments.checks.prose": "unit/test_prose.py",
    "deployments.checks.readme": "unit/deployments/test_readme.py",
    # It changes `sys.executable`, and becomes `prefect worker start`.
    "deployments.stack.prefect_worker": "builders/submissions.py",
    "deployments.stack.register": "integration/test_server.py",
    "deployments.up": "integration/test_command_line.py",
}
"""Commands that are not run here with `--help`, each with the file of the tests that runs it."""


def commands() -> list[str]:
    """Return the modules that the Makefile, READMEs, images, scripts and printed texts run."""
    places = [ROOT / name for name in ("Makefile", "README.md", ".github", "deployments", "docker", "flows", "tasks")]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file()]
    texts = [file.read_text() for file in files if file.suffix not in {".pyc", ".png"}]
    return sorted({name for text in texts for name in COMMAND.findall(text)})


def test_commands_are_found():
    """The search sees a command of a README, of the Makefile, of a script, and of a text that is printed."""
    assert {"flows.pipeline", "deployments.setup.class_archive", "deployments.worker", "flows.rollback"} <= set(
        commands()
    )


@pytest.mark.parametrize("command", [name for name in commands() if name not in NO_OPTIONS])
def test_command_prints_its_options(command, monkeypatch, capsys):
    """A command that a file names runs."""
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    monkeypatch.delitem(sys.modules, command, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out.lower()


@pytest.mark.parametrize(("command", "test_file"), NO_OPTIONS.items())
def test_command_without_options_is_run_by_another_test(command, test_file):
    """The module, and a test that runs it, exist."""
    text = (ROOT / "tests" / test_file).read_text()
    assert (ROOT / (command.replace(".", "/") + ".py")).is_file()
    package, _, name = command.rpartition(".")
    assert command in text or f"from {package} import {name}" in text
