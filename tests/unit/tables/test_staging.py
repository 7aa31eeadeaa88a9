"""Removing the parts of killed runs, on tables that were written without Spark."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tasks.etl.staging import is_swept, sweep_killed_runs

PARTS = r"part-[^/]*\.parquet"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table with two commits, of a data file each."""
    folder = tmp_path / "files"
    for number in range(2):
        write_deltalake(folder.as_uri(), pa.table({"path": [str(number)]}), mode="append")
    return folder


def run_of(table: Path, version: int) -> str:
    """Return the part of a data file's name by which its run is known, here that of one commit's only file."""
    (name,) = re.findall(PARTS, (table / "_delta_log" / f"{version:020}.json").read_text())
    return name.split("-")[2]


def leave_mark(table: Path, version: int, run: str) -> None:
    """Leave what a run leaves that is killed: a mark, and a part that no commit names."""
    (table / "_delta_log" / f"_unfinished-{version}-{run}").touch()
    (table / f"part-00001-{run}-0123456789ab.parquet").write_bytes(b"PAR1 and no more")


def expire_log(table: Path, below: int) -> None:
    """Checkpoint the table and remove the commits below a version, as Delta's clean-up of the log does."""
    DeltaTable(table.as_uri()).create_checkpoint()
    for version in range(below):
        (table / "_delta_log" / f"{version:020}.json").unlink()


def rows(table: Path, version: int | None = None) -> int:
    """Return how many rows the table has; each is read."""
    return DeltaTable(table.as_uri(), version=version).to_pyarrow_table().num_rows


def test_a_part_stays_that_only_a_checkpoint_names(table: Path) -> None:
    """The run was killed between its commit and the removal of its mark, and the log expired before the next one."""
    run = run_of(table, 0)
    leave_mark(table, -1, run)
    expire_log(table, below=1)

    sweep_killed_runs(str(table))

    assert rows(table) == 2
    assert not list(table.glob("*-0123456789ab.parquet"))
    assert is_swept(str(table))


def test_a_part_stays_that_a_kept_version_names(table: Path) -> None:
    """It left the newest version, and VACUUM would keep it for a week: the checkpoint remembers that it was removed."""
    run = run_of(table, 0)
    leave_mark(table, -1, run)
    before = {path.name for path in table.glob(f"*-{run}-*")}
    write_deltalake(table.as_uri(), pa.table({"path": ["all"]}), mode="overwrite")
    expire_log(table, below=1)

    sweep_killed_runs(str(table))

    assert rows(table) == 1
    left = {path.name for path in table.glob(f"*-{run}-*")}
    assert left == {name for name in before if not name.endswith("-0123456789ab.parquet")} != set()


def test_a_part_that_no_commit_named_is_removed(table: Path) -> None:
    """Its run was killed before it committed, and the table went on."""
    leave_mark(table, 0, "dead")

    sweep_killed_runs(str(table))

    assert rows(table) == 2
    assert not list(table.glob("*-dead-*"))
    assert is_swept(str(table))
