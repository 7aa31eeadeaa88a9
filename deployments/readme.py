"""The generated parts of the READMEs: trees from docstrings, benchmark tables from $LAKEVISION_HOME/bench/*.json."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tasks.environment import lakevision_home

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TREE = re.compile(r"(<!-- tree: (\S+) -->\n```tree\n).*?(^```\n)", re.DOTALL | re.MULTILINE)
"""A fenced block with a line for each file below the folder that the marker names."""

TABLE = re.compile(r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

DESCRIBED = (".py", ".sh", ".yaml", ".java")
"""Files that a reader may open; Dockerfiles are others."""

_COMMENT = re.compile(r"\A(?:#!.*\n)?# (.*)")
_JAVADOC = re.compile(r"^/\*\*\s+(?:\* )?(.*?)(?:\s*\*/)?$", re.MULTILINE)


def readmes() -> list[Path]:
    """Return the READMEs of the project."""
    return [ROOT / path for path in _tracked() if Path(path).name == "README.md"]


def _tracked(folder: str = ".") -> list[str]:
    # Also files that are new and not ignored: a tree is generated before they are committed.
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard", "--", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({path for path in listed if path and (ROOT / path).exists()})


def described_files(folder: str) -> list[str]:
    """Return the files below a folder that its tree names, relative to the project; packages' __init__.py are not."""
    return [
        path
        for path in _tracked(folder)
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
    """Return a line for each described file below a folder: its path within the folder, and its description."""
    files = {path.removeprefix(f"{folder}/"): description(path) for path in described_files(folder)}
    # Files of the folder itself after its packages.
    ordered = sorted(files, key=lambda path: ("/" not in path, path))
    width = max(map(len, files)) + 2
    return "".join(f"{path:<{width}}{files[path]}\n" for path in ordered)


def with_trees(text: str) -> str:
    """Return the text of a README with its trees as the files are now."""
    return TREE.sub(lambda found: f"{found[1]}{tree(found[2])}{found[3]}", text)


def with_tables(text: str, tables: dict[str, str]) -> str:
    """Return the text of a README with those of its benchmark tables replaced that are given, by name."""

    def replace(found: re.Match[str]) -> str:
        table = tables.get(found[2])
        return found[0] if table is None else f"{found[1]}{table}\n{found[3]}"

    return TABLE.sub(replace, text)


def main() -> int:
    """Bring every tree in line with the files, and every table with the figures that were measured last."""
    from tests.benchmarks.figures import read_table

    files = sorted((lakevision_home() / "bench").glob("*.json"))
    tables = {file.stem: read_table(file) for file in files}
    if not tables:
        print(f"no figures in {lakevision_home() / 'bench'}: tables stay as they are (make bench measures)")
    for readme in readmes():
        before = readme.read_text()
        after = with_tables(with_trees(before), tables)
        if after != before:
            readme.write_text(after)
            print(f"{readme.relative_to(ROOT)} brought up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
