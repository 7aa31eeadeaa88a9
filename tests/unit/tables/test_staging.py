"""Removing the parts of killed runs, on tables that were written without Spark."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tasks.etl.commits import is_swept, staged_parts, sweep_killed_runs

PARTS = r"part-[^/]*\.parquet"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table with two commits of one data file each."""
    folder = tmp_path / "files"
    for number in range(2):
        write_deltalake(folder.as_uri(), pa.table({"path": [str(number)]}), mode="append")
    return folder


def run_of(table: Path, version: int) -> str:
    """Return the run in the name of the only data file of a commit."""
    (name,) = re.findall(PARTS, (table / "_delta_log" / f"{version:020}.json").read_text())
    return name.split("-")[2]


def leave_marker(table: Path, version: int, run: str) -> None:
    """Write the files of a killed run: a marker file, and an uncommitted part."""
    (table / "_delta_log" / f"_unfinished-{version}-{run}").touch()
    (table / f"part-00001-{run}-0123456789ab.parquet").write_bytes(b"PAR1 and no more")


def expire_log(table: Path, below: int) -> None:
    """Checkpoint the table and remove the commits below a version, as Delta's clean-up of the log does."""
    DeltaTable(table.as_uri()).create_checkpoint()
    for version in range(below):
        (table / "_delta_log" / f"{version:020}.json").unlink()


def rows(table: Path, version: int | None = None) -> int:
    """Return the number of rows of the table, after all of them are read."""
    return DeltaTable(table.as_uri(), version=version).to_pyarrow_table().num_rows


def test_part_that_only_a_checkpoint_names_is_kept(table: Path) -> None:
    """A run's parts are kept if it was killed before the removal of its marker, and its commit left the log since."""
    run = run_of(table, 0)
    leave_marker(table, -1, run)
    expire_log(table, below=1)

    sweep_killed_runs(str(table))

    assert rows(table) == 2
    assert not list(table.glob("*-0123456789ab.parquet"))
    assert is_swept(str(table))


def test_part_that_a_kept_version_names_is_kept(table: Path) -> None:
    """A part that was removed from the newest version, and that VACUUM still keeps, is named by the checkpoint."""
    run = run_of(table, 0)
    leave_marker(table, -1, run)
    before = {path.name for path in table.glob(f"*-{run}-*")}
    write_deltalake(table.as_uri(), pa.table({"path": ["all"]}), mode="overwrite")
    expire_log(table, below=1)

    sweep_killed_runs(str(table))

    assert rows(table) == 1
    left = {path.name for path in table.glob(f"*-{run}-*")}
    assert left == {name for name in before if not name.endswith("-0123456789ab.parquet")} != set()


def test_uncommitted_part_is_removed(table: Path) -> None:
    """The part of a run that was killed before its commit is removed."""
    leave_marker(table, 0, "dead")

    sweep_killed_runs(str(table))

    assert rows(table) == 2
    assert not list(table.glob("*-dead-*"))
    assert is_swept(str(table))


def test_part_that_a_late_task_writes_during_the_next_run_is_removed(tmp_path: Path) -> None:
    """The run before failed while it created the table, and a task of it still writes while the next run creates it."""
    folder = tmp_path / "new"
    (folder / "_delta_log").mkdir(parents=True)
    leave_marker(folder, -1, "dead")
    with staged_parts(str(folder), None):
        assert not list(folder.glob("*-dead-*"))
        (folder / "part-00002-dead-0123456789ab.parquet").write_bytes(b"PAR1 and no more")
        write_deltalake(folder.as_uri(), pa.table({"path": ["0"]}))

    assert rows(folder) == 1
    assert not list(folder.glob("*-dead-*"))
    assert is_swept(str(folder))
