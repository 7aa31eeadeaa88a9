"""Tables that `make readme` makes from what tests wrote."""

from pathlib import Path

import pytest

from deployments.checks import readme
from deployments.checks.readme import longest_files, with_tables

JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest">
<testcase classname="tests.unit.test_a" name="test_one" time="1.5" />
<testcase classname="tests.unit.test_b" name="test_one" time="7.0"><skipped message="no GPU" /></testcase>
<testcase classname="tests.unit.test_a" name="test_two[a.b]" time="0.5" />
<testcase classname="tests.unit.test_c" name="test_one" time="1.0" />
</testsuite></testsuites>
"""


def test_table_of_the_longest_test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has the seconds of all its tests, the longest comes first, and the last row has the others."""
    monkeypatch.setattr(readme, "LONGEST_FILES", 2)
    (tmp_path / "test-all.xml").write_text(JUNIT)

    table = longest_files(tmp_path / "test-all.xml")

    assert table.splitlines()[2:] == [
        "| `tests/unit/test_b.py` | 1 | 7 | 70.0% |",
        "| `tests/unit/test_a.py` | 2 | 2 | 20.0% |",
        "| 1 others | 1 | 1 | 10.0% |",
    ]
    text = "before\n<!-- bench:test-files -->\nold\n<!-- /bench -->\nafter\n"
    assert with_tables(text, {"test-files": "new"}) == text.replace("old", "new")
