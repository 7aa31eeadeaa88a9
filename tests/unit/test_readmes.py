"""Text for readers: links, paths, commands and imports in it exist, and the changelog keeps its form."""

import ast
import importlib
import importlib.util
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.checks.readme import readmes
from tasks.launch.launcher import FAILED_GRACE_SECONDS, SHUTDOWN_GRACE_SECONDS
from tests.benchmarks import scaling_model
from tests.builders.processes import ROOT

MAX_README_LINES = 200
"""Of the README at the top; details belong to the READMEs of the folders."""

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
PATH = re.compile(r"(?:tasks|flows|deployments|docker|tests)/[\w./*-]*[\w*]")
MODULE = re.compile(r"\bpython -m ((?:flows|tasks|deployments|tests)(?:\.\w+)*)")
TARGET = re.compile(r"^(?:\w+=\S+ )*make ([a-z][a-z0-9-]*)")
NAME_IN_FILE = re.compile(r"`([\w.]+)` (?:in|of)\s+`((?:tasks|flows|deployments|tests)/[\w/]+\.py)`")

CHANGE_KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""Headings of https://keepachangelog.com/en/1.1.0/."""
VERSION = re.compile(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}")

needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="needs git and a checkout, to know which files are tracked",
)


def documents() -> list[Path]:
    """Return every README, and the documents that GitHub shows."""
    return [*readmes(), *sorted((ROOT / ".github").glob("*.md")), ROOT / "CHANGELOG.md"]


def slugs(text: str) -> set[str]:
    """Return the anchors of a Markdown text's headings by GitHub's rule: lower case, hyphens for spaces, numbered."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(file: Path, text: str) -> list[str]:
    """Return the relative links that lead to no file, or to no heading of it."""
    broken = []
    for link in LINK.findall(CODE.sub("code", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        exists = target.is_relative_to(ROOT) and target.exists()
        if not exists or (anchor and anchor not in slugs(text if target == file else target.read_text())):
            broken.append(link)
    return broken


def code_of(text: str) -> Iterator[str]:
    """Yield every code span and the lines of every fenced block, but those of the trees, which are generated."""
    yield from CODE.findall(FENCE.sub("", text))
    for language, block in FENCE.findall(text):
        if language != "tree":
            yield from block.splitlines()


def missing_paths(text: str) -> list[str]:
    """Return the paths of the project that stand in code spans and do not exist; an asterisk matches any name."""
    named = [found for found in CODE.findall(FENCE.sub("", text)) if PATH.fullmatch(found)]
    # A file such as docker/.env is the user's own.
    return [path for path in named if not Path(path).name.startswith(".") and not any(ROOT.glob(path))]


def missing_names(text: str) -> list[str]:
    """Return the names that a text places in a file of the project, "`name` in `file`", and that are not in it."""
    named = NAME_IN_FILE.findall(FENCE.sub("", text))
    return [
        f"{name} in {path}"
        for name, path in named
        if (ROOT / path).is_file()
        and not all(re.search(rf"\b{part}\b", (ROOT / path).read_text()) for part in name.split("."))
    ]


def missing_modules(text: str) -> list[str]:
    """Return the modules that a command runs with `python -m` and that do not exist."""
    named = [name for line in code_of(text) for name in MODULE.findall(line)]
    return [name for name in named if not is_importable(name)]


def missing_targets(text: str) -> list[str]:
    """Return the targets of `make` that are not in the Makefile."""
    rules = re.findall(r"^([a-z][a-z0-9% -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = re.compile("|".join(name.replace("%", r"[\w-]+") for rule in rules for name in rule.split()))
    named = [name for line in code_of(text) for name in TARGET.findall(line)]
    return [name for name in named if not known.fullmatch(name)]


def missing_imports(text: str) -> list[str]:
    """Return the imports of fenced Python blocks that cannot be resolved."""
    missing = []
    for language, block in FENCE.findall(text):
        for node in ast.walk(ast.parse(block)) if language == "python" else ():
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name, None) for alias in node.names]
            missing += [f"{module}: {name}" for module, name in names if not is_importable(module, name)]
    return missing


def is_importable(module: str, name: str | None = None) -> bool:
    """Return whether a module exists and, if a name is given, whether it can be imported from it."""
    try:
        if importlib.util.find_spec(module) is None:
            return False
        if name is None or hasattr(importlib.import_module(module), name):
            return True
        return importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:  # A package above it does not exist, or is a module.
        return False


def missing(text: str) -> list[str]:
    """Return everything that a document names and that does not exist."""
    checks = (missing_paths, missing_names, missing_modules, missing_targets, missing_imports)
    return [name for check in checks for name in check(text)]


def changelog_problems(text: str) -> list[str]:
    """Return the headings of a changelog that Keep a Changelog does not have, or has elsewhere."""
    problems = [] if text.startswith("# Changelog\n") else ["it does not begin with '# Changelog'"]
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    names = [version.split("\n", 1)[0] for version in versions]
    problems += [f"'{name}' is not a version with its date" for name in names if not VERSION.fullmatch(name)]
    if names[:1] != ["[Unreleased]"] or names.count("[Unreleased]") != 1:
        problems.append("[Unreleased] is not the first version")
    dates = [name.rpartition(" - ")[2] for name in names[1:]]
    if dates != sorted(dates, reverse=True):
        problems.append("the newest version is not the first")
    for name, version in zip(names, versions, strict=True):
        kinds = re.findall(r"^### (.+)$", version, re.MULTILINE)
        problems += [f"{name} has a list '{kind}'" for kind in kinds if kind not in CHANGE_KINDS]
        problems += [f"{name} has the list '{kind}' twice" for kind, count in Counter(kinds).items() if count > 1]
        if len(names) == 1 and set(kinds) - {"Added"}:
            problems.append("nothing was released that could be changed or fixed: use Added")
    return problems


@needs_git
def test_every_relative_link_leads_to_a_file_and_its_heading() -> None:
    """In all documents; an anchor is that of a heading."""
    assert {file.relative_to(ROOT).as_posix(): broken_links(file, file.read_text()) for file in documents()} == {
        file.relative_to(ROOT).as_posix(): [] for file in documents()
    }


@needs_git
def test_paths_modules_targets_and_imports_in_documents_exist() -> None:
    """A document names only what a reader finds."""
    found = {file.relative_to(ROOT).as_posix(): missing(file.read_text()) for file in documents()}

    assert {name: names for name, names in found.items() if names} == {}


def test_the_readme_at_the_top_is_short() -> None:
    """It has at most 200 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_readme_begins_with_the_cost_of_the_set_up_and_the_good_command_for_own_images() -> None:
    """The first command for a folder starts from pretrained weights; its accuracy stands beside that from scratch."""
    text = (ROOT / "README.md").read_text()
    first_screen = text.partition("## Two commands")[2].partition("\n## ")[0]
    assert re.search(r"5 to 10 minutes and a download of about 4 GB", first_screen.partition("make test-all")[0])
    commands = [line for line in text.splitlines() if line.startswith("make demo SOURCE=")]
    assert commands
    assert "WEIGHTS" not in commands[0]
    after = text.partition(commands[0])[2].partition("```\n\n")[2].partition("\n\n")[0]
    assert ("0.97" in after, "0.73" in after) == (True, True)


def _hooks() -> list[dict[str, Any]]:
    """Return the hooks of pre-commit."""
    hooks: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    return hooks


def test_hooks_before_a_commit_run_commands_of_the_makefile() -> None:
    """As CONTRIBUTING.md says: the checks of `make lint` and `make types`, and no others."""
    hooks = [hook for hook in _hooks() if hook.get("stages") != ["commit-msg"]]
    makefile = (ROOT / "Makefile").read_text().replace("$(python)", ".venv/bin/python")
    commands = {line.removeprefix("\t@") for line in makefile.splitlines()}

    assert [hook["id"] for hook in hooks if hook["entry"] not in commands] == []
    assert {hook["language"] for hook in hooks} == {"system"}


@pytest.mark.parametrize(
    ("message", "accepted"),
    [("x" * 72, True), (f"{'x' * 72}\n\n{'y' * 90}\n", True), ("x" * 73, False), (f"{'x' * 73}\n\nwhy\n", False)],
)
def test_hook_refuses_a_commit_subject_above_72_characters(message: str, accepted: bool) -> None:
    """The pattern as pre-commit's pygrep matches it with --multiline; lines of the body may be longer."""
    (hook,) = [hook for hook in _hooks() if hook.get("stages") == ["commit-msg"]]

    assert hook["args"] == ["--negate", "--multiline"]
    assert bool(re.search(hook["entry"], message, re.MULTILINE | re.DOTALL)) is accepted


def test_changelog_has_the_form_of_keep_a_changelog() -> None:
    """Versions, their order and the lists in them."""
    assert changelog_problems((ROOT / "CHANGELOG.md").read_text()) == []


def test_table_of_the_model_of_many_gpus_is_its_output() -> None:
    """The figures in the README of the benchmarks are computed by the code beside it."""
    assert scaling_model.table() in (ROOT / "tests" / "benchmarks" / "README.md").read_text()


def test_anchors_follow_the_rule_of_github() -> None:
    """Punctuation goes, spaces become hyphens, a second heading of the same text gets a number."""
    text = "# A: `b_c` & D-e\n```sh\n# no heading\n```\n## [Files](x.md)\n## Files\n"
    assert slugs(text) == {"a-b_c--d-e", "files", "files-1"}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](flows/README.md) and ![b](LICENSE)", []),
        ("[a](flows/nothing.md)", ["flows/nothing.md"]),
        ("[a](#no-heading)", ["#no-heading"]),
        ("# A heading\n[a](#a-heading), [b](#a-headin)", ["#a-headin"]),
        ("[a](flows/README.md#no-heading)", ["flows/README.md#no-heading"]),
        ("[a](../outside.md), `[b](c)`, [d](https://example.org/#e)", ["../outside.md"]),
        ("[`code`](nothing.py)", ["nothing.py"]),
    ],
)
def test_a_broken_link_is_found(text: str, broken: list[str]) -> None:
    """Its target, its anchor, or both."""
    assert broken_links(ROOT / "README.md", text) == broken


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("`tasks/refs.py`, `tasks/*/task.py`, `tests/unit`, `docker/.env`", []),
        ("`tasks/nothing.py`", ["tasks/nothing.py"]),
        ("`tasks/*/nothing.py`", ["tasks/*/nothing.py"]),
        ("`CacheRef` in `tasks/refs.py`, `NoRef` in\n`tasks/refs.py`", ["NoRef in tasks/refs.py"]),
        ("`apt-get install make python3`", []),
        ("```sh\n.venv/bin/python -m flows.nothing\n```", ["flows.nothing"]),
        ("`python -m flows.pipeline`", []),
        ("`make nothing`, `make jars-s3a`, then make a cup of tea", ["nothing"]),
        ("```sh\nBASE=x make image   # builds\nmake nothing\n```", ["nothing"]),
        ("```python\nfrom tasks.refs import CacheRef\nimport flows.pipeline\n```", []),
        ("```python\nfrom tasks.refs import Nothing\n```", ["tasks.refs: Nothing"]),
        ("```python\nfrom tasks.nothing.more import CacheRef\n```", ["tasks.nothing.more: CacheRef"]),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, problems: list[str]) -> None:
    """A path, a module of a command, a target of make, or an import."""
    assert missing(text) == problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Changes\n", "it does not begin with"),
        ("# Changelog\n\n## [1.0.0] - 2026-01-02\n", "[Unreleased] is not the first version"),
        ("# Changelog\n\n## [Unreleased]\n\n## 1.0.0\n", "'1.0.0' is not a version with its date"),
        ("# Changelog\n\n## [Unreleased]\n\n### New\n\n- A.\n", "[Unreleased] has a list 'New'"),
        ("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A.\n\n### Added\n\n- B.\n", "has the list 'Added' twice"),
        ("# Changelog\n\n## [Unreleased]\n\n### Fixed\n\n- A.\n", "nothing was released"),
        (
            "# Changelog\n\n## [Unreleased]\n\n## [1.0.0] - 2026-01-02\n\n## [1.1.0] - 2026-02-02\n",
            "the newest version is not the first",
        ),
    ],
)
def test_a_changelog_of_another_form_is_refused(text: str, problem: str) -> None:
    """By the heading that is wrong."""
    assert any(problem in found for found in changelog_problems(text)), changelog_problems(text)


def test_time_that_ranks_have_after_sigterm_is_that_of_the_launcher() -> None:
    """The README of the orchestration has both times."""
    times = f"SIGKILL after {SHUTDOWN_GRACE_SECONDS:.0f} seconds, or after {FAILED_GRACE_SECONDS:.0f} if one has failed"
    assert times in (ROOT / "tasks/orchestration/README.md").read_text()
