"""Rewriting of files without some of their rows, called without Spark."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from tasks.refs import TableRef
from tasks.schema import ADDED_TO_FILES, FILES_ARROW, IMAGES_ARROW
from tasks.tables import parts
from tasks.tables.cut import CHANGES_ARROW, cut_ledger, make_cutter
from tasks.tables.parts import PartTarget, PartWriter
from tasks.tables.snapshots import files_containing

TODAY = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartTarget:
    """Return a target for files with three images per row group."""
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 250)
    (tmp_path / "_change_data").mkdir()
    return PartTarget(str(tmp_path), "5eed", TODAY)


def write(target: PartTarget, numbers: Iterable[int]) -> str:
    """Write a part with the given images; return its name."""
    columns = {"label": "cat", "content": b"x" * 100, "width": 4, "height": 3, "split": "train", "dhash": 1}
    with PartWriter(target) as writer:
        (name,) = {writer.add(columns | {"sha256": str(number)}) for number in numbers}
    return name


def cut(target: PartTarget, name: str, deleted: str, moved: str, *, is_new: bool = False) -> dict[str, Any]:
    """Remove images from a part; each digit of `deleted` and `moved` is the sha256 of an image."""
    request = pa.RecordBatch.from_pylist([{"name": name, "is_new": is_new}])
    contents = [pa.array(list(names), pa.string()) for names in (deleted, moved)]
    ((done,),) = [batch.to_pylist() for batch in make_cutter(target, *contents)([request])]
    return done


def changes(target: PartTarget, done: dict[str, Any]) -> list[tuple[str, str]]:
    """Return sha256 and change type of the rows for the change data feed, in order."""
    table = pq.read_table(f"{target.folder}/{done['changes']}")
    assert table.schema.equals(CHANGES_ARROW)
    return list(zip(table["sha256"].to_pylist(), table["_change_type"].to_pylist(), strict=True))


def test_file_is_rewritten_without_the_deleted_rows(target: PartTarget) -> None:
    """Deleted rows are in the change data feed, moved ones as updates, and the old file is unchanged."""
    name = write(target, range(8))
    done = cut(target, name, deleted="16", moved="6")

    assert pq.read_table(f"{target.folder}/{done['added']}")["sha256"].to_pylist() == list("023457")
    assert (done["name"], done["rows"]) == (name, 6)
    assert pq.ParquetFile(f"{target.folder}/{done['added']}").schema_arrow.equals(IMAGES_ARROW)
    assert changes(target, done) == [("1", "delete"), ("6", "update_preimage")]
    assert pq.ParquetFile(f"{target.folder}/{name}").metadata.num_rows == 8


def test_file_whose_rows_are_all_deleted_is_not_replaced(target: PartTarget) -> None:
    """Removing all rows of a file writes no empty file."""
    name = write(target, range(3))
    done = cut(target, name, deleted="0123", moved="")

    assert (done["added"], done["rows"]) == (None, 0)
    assert [kind for _, kind in changes(target, done)] == ["delete"] * 3
    assert [path.name for path in Path(target.folder).glob("*.parquet")] == [name]


def test_new_rows_are_in_the_feed_and_their_file_is_not_rewritten(target: PartTarget) -> None:
    """New rows are inserts in the feed, and a moved row is the postimage of an update."""
    name = write(target, range(4))
    done = cut(target, name, deleted="6", moved="2", is_new=True)

    assert done["added"] is None
    assert changes(target, done) == [("0", "insert"), ("1", "insert"), ("2", "update_postimage"), ("3", "insert")]
    assert [path.name for path in Path(target.folder).glob("*.parquet")] == [name]


def test_int96_timestamps_of_spark_are_read(target: PartTarget) -> None:
    """Files with INT96 timestamps, as Delta's compaction writes them, are read with equal values."""
    name = write(target, range(2))
    table = pq.read_table(f"{target.folder}/{name}")
    pq.write_table(table, f"{target.folder}/{name}", use_deprecated_int96_timestamps=True)
    done = cut(target, name, deleted="0", moved="")

    assert pq.read_table(f"{target.folder}/{done['added']}").equals(table.slice(1))


def test_only_files_with_the_rows_are_found(tmp_path: Path) -> None:
    """Files with the values are found in the requested version, without Spark for a local table."""
    for name in ("ab", "cd", "ef"):
        write_deltalake(tmp_path.as_uri(), pa.table({"path": list(name), "size": [1, 2]}), mode="append")
    ((first,),) = [deltalake_files(tmp_path, version=0)]
    table = TableRef(path=str(tmp_path), version=2)
    found = files_containing(None, table, "path", pa.array(["b", "e", "no"]))
    assert len(found) == 2
    assert first in found
    assert files_containing(None, table.model_copy(update={"version": 0}), "path", pa.array(["e"])) == []


def deltalake_files(folder: Path, version: int) -> list[str]:
    """Return the names of the files of a version."""
    return pa.table(DeltaTable(folder.as_uri(), version=version).get_add_actions())["path"].to_pylist()


def test_rows_of_the_ledger_are_replaced_by_path(target: PartTarget) -> None:
    """A single file replaces the given ones, with changed and new rows by path."""

    def rows(**outcomes: str) -> pa.Table:
        return pa.Table.from_pylist(
            [
                {"path": path, "size": 1, "modified_at": TODAY, "outcome": outcome, "seen_at": TODAY}
                for path, outcome in outcomes.items()
            ],
            schema=FILES_ARROW,
        )

    # The second file is of an earlier release, without columns that were added to the table since.
    for number, table in enumerate(
        (rows(a="stored", b="stored"), rows(c="stored", e="stored").drop(list(ADDED_TO_FILES)))
    ):
        pq.write_table(table, f"{target.folder}/{number}.parquet")
    done = cut_ledger(target, ["0.parquet", "1.parquet"], rows(b="deleted", c="quarantined", d="stored"))

    ((name, num_rows),) = done.added.items()
    assert done.removed == ["0.parquet", "1.parquet"]
    found = pq.read_table(f"{target.folder}/{name}")
    assert found.schema.equals(FILES_ARROW)
    assert found.num_rows == num_rows == 5
    assert dict(zip(found["path"].to_pylist(), found["outcome"].to_pylist(), strict=True)) == {
        "a": "stored",
        "b": "deleted",
        "c": "quarantined",
        "d": "stored",
        "e": "stored",
    }
