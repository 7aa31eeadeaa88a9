"""The generated parts of the READMEs: trees from docstrings, tables from what benchmarks and tests wrote to the home.

Benchmarks write $LAKEVISION_HOME/bench/*.json, and `make test-all` writes $LAKEVISION_HOME/test-all.xml.
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

from tasks.environment import lakevision_home

ROOT = Path(__file__).resolve().parents[2]

TREE = re.compile(r"(<!-- tree: (\S+) -->\n```tree\n).*?(^```\n)", re.DOTALL | re.MULTILINE)
"""A fenced block with a line for each file below the folder that the marker names."""

TABLE = re.compile(r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

DESCRIBED = (".py", ".sh", ".yaml", ".java")
"""Files that a reader may open; Dockerfiles are others."""

LONGEST_FILES = 20
"""Rows of the table of test files."""

_COMMENT = re.compile(r"\A(?:#!.*\n)?# (.*)")
_JAVADOC = re.compile(r"^/\*\*\s+(?:\* )?(.*?)(?:\s*\*/)?$", re.MULTILINE)


def readmes() -> list[Path]:
    """Return the READMEs of the project."""
    return [ROOT / path for path in tracked() if Path(path).name == "README.md"]


def tracked(*patterns: str) -> list[str]:
    """Return the files of the project, or those that match git's patterns or are below these folders."""
    # Also files that are new and not ignored: a tree is generated before they are committed.
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({path for path in listed if path and (ROOT / path).exists()})


def described_files(folder: str) -> list[str]:
    """Return the files below a folder that its tree names, relative to the project; packages' __init__.py are not."""
    return [
        path
        for path in tracked(folder)
        if (path.endswith(DESCRIBED) or Path(path).name.startswith("Dockerfile")) and Path(path).name != "__init__.py"
    ]


def description(path: str) -> str:
    """Return the first sentence of a module's docstring, or of the comment that a file begins with.

    Raises:
        ValueError: The file has neither.
    """
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        found = ast.get_docstring(ast.parse(text))
    else:
        comment = (_JAVADOC if path.endswith(".java") else _COMMENT).search(text)
        found = comment[1] if comment else None
    if not found:
        raise ValueError(f"{path} does not begin with a docstring or comment that says what it is: add one")
    return found.split("\n")[0].rstrip(".")


def tree(folder: str) -> str:
    """Return a line for each described file below a folder: its path within the folder, and its description.

    A folder below it with a README has one line, since its files are in a tree of its own.
    """
    described = described_files(folder)
    readmes_below = [path for path in tracked(folder) if path.endswith("/README.md") and path != f"{folder}/README.md"]
    own = [f"{Path(path).parent}/" for path in readmes_below]
    files = {
        path.removeprefix(f"{folder}/"): description(path) for path in described if not path.startswith(tuple(own))
    }
    packages = [package for package in own if (ROOT / package / "__init__.py").exists()]
    files |= {package.removeprefix(f"{folder}/"): description(f"{package}__init__.py") for package in packages}
    # Files of the folder itself after its packages.
    ordered = sorted(files, key=lambda path: ("/" not in path, path))
    width = max(map(len, files)) + 2
    return "".join(f"{path:<{width}}{files[path]}\n" for path in ordered)


def with_trees(text: str) -> str:
    """Return the text of a README with its trees as the files are now."""
    return TREE.sub(lambda found: f"{found[1]}{tree(found[2])}{found[3]}", text)


def with_tables(text: str, tables: dict[str, str]) -> str:
    """Return the text of a README with those of its benchmark tables replaced that are given, by name."""
    return TABLE.sub(
        lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}" if found[2] in tables else found[0], text
    )


def longest_files(junit: Path) -> str:
    """Return the test files with the most seconds of a run as a Markdown table, from pytest's JUnit file."""
    seconds, tests = defaultdict[str, float](float), Counter[str]()
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314  # the file of the own pytest
        file = f"{case.attrib['classname'].replace('.', '/')}.py"
        seconds[file] += float(case.attrib["time"])
        tests[file] += 1
    whole = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda file: -file[1])
    rows = [(f"`{file}`", str(tests[file]), taken) for file, taken in ordered[:LONGEST_FILES]]
    others = ordered[LONGEST_FILES:]
    rows.append(
        (f"{len(others)} others", str(sum(tests[file] for file, _ in others)), sum(taken for _, taken in others))
    )
    lines = ["| file | tests | seconds | share |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {file} | {count} | {taken:.0f} | {taken / whole:.1%} |" for file, count, taken in rows)]
    )


def main() -> int:
    """Bring every tree in line with the files, and every table with the figures that were measured last."""
    from tests.benchmarks.figures import read_table

    files = sorted((lakevision_home() / "bench").glob("*.json"))
    tables = {file.stem: read_table(file) for file in files}
    junit = lakevision_home() / "test-all.xml"
    if junit.exists():
        tables["test-files"] = longest_files(junit)
    if not tables:
        print(f"no figures in {lakevision_home()}: tables stay as they are (make bench and make test-all measure)")
    for readme in readmes():
        before = readme.read_text()
        after = with_tables(with_trees(before), tables)
        if after != before:
            readme.write_text(after)
            print(f"{readme.relative_to(ROOT)} brought up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
