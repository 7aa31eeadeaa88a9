"""Write the README's benchmark tables from $LAKEVISION_HOME/bench/*.json; never by hand."""

import re
import sys
from pathlib import Path

from tasks.environment import lakevision_home

README = Path(__file__).resolve().parent.parent / "README.md"
sys.path.insert(0, str(README.parent))


def replace_table(text: str, name: str, table: str) -> str:
    """Return `text` with what stands between the markers of `name` replaced.

    Raises:
        ValueError: The markers are missing.
    """
    pattern = re.compile(rf"(<!-- bench:{re.escape(name)} -->\n).*?(<!-- /bench -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{README} has no markers for '{name}': add '<!-- bench:{name} -->' and '<!-- /bench -->'")
    return pattern.sub(lambda found: f"{found.group(1)}{table}\n{found.group(2)}", text)


def main() -> int:
    """Bring every table in line with its file; return 1 when there is none."""
    from tests.benchmarks.figures import read_table

    files = sorted((lakevision_home() / "bench").glob("*.json"))
    if not files:
        print(f"no figures in {lakevision_home() / 'bench'}: run make bench first", file=sys.stderr)
        return 1
    text = README.read_text()
    for file in files:
        text = replace_table(text, file.stem, read_table(file))
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
