"""Commits by delta-rs: of files in a table's folder, and of rows in place of others, called without Spark."""

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import StringType, StructField, StructType

from tasks.refs import TableRef
from tasks.schema import FILES, FILES_ARROW
from tasks.spark.session import NeedsSpark
from tasks.tables import direct_commits
from tasks.tables.direct_commits import add_files, append_rows, replace_few_rows
from tasks.tables.snapshots import files_containing, newest_snapshot
from tasks.tables.writer import TableChanged

TODAY = datetime(2026, 1, 2, tzinfo=UTC)
FEED = {"delta.enableChangeDataFeed": "true", "lakevision.source": "/photos"}


def rows(**outcomes: str) -> pa.Table:
    """Return rows of the ledger, by path."""
    return pa.Table.from_pylist(
        [
            {"path": path, "size": 1, "modified_at": TODAY, "outcome": outcome, "seen_at": TODAY}
            for path, outcome in outcomes.items()
        ],
        schema=FILES_ARROW,
    )


def write(table: Path, name: str, **outcomes: str) -> dict[str, int]:
    """Write a file into the folder of a table; return its name and number of rows."""
    table.mkdir(exist_ok=True)
    pq.write_table(rows(**outcomes), table / name)
    return {name: len(outcomes)}


def outcomes_of(table: Path, version: int | None = None) -> dict[str, str]:
    """Return the outcome of each path in a version, after reading all rows by PyArrow."""
    found = DeltaTable(table, version=version).to_pyarrow_table()
    outcomes = dict(zip(found["path"].to_pylist(), found["outcome"].to_pylist(), strict=True))
    assert len(outcomes) == found.num_rows
    return outcomes


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table of two files, made in one commit, with a change data feed and a property of this project."""
    folder = tmp_path / "files"
    files = write(folder, "0.parquet", a="stored", b="stored") | write(folder, "1.parquet", c="stored")
    add_files(str(folder), files, None, FILES, FEED)
    return folder


def test_table_is_created_with_its_files_and_properties_in_one_commit(table: Path) -> None:
    """A killed run leaves all of it or nothing; a second creation is a conflict."""
    snapshot = newest_snapshot(None, str(table))
    assert (snapshot.table.version, snapshot.table.source) == (0, "/photos")
    assert FEED.items() <= snapshot.properties.items()
    assert outcomes_of(table) == {"a": "stored", "b": "stored", "c": "stored"}
    assert newest_snapshot(None, str(table)).schema.fieldNames() == FILES.fieldNames()
    with pytest.raises(TableChanged):
        add_files(str(table), write(table, "2.parquet", d="stored"), None, FILES, FEED)


def test_files_are_appended_or_replace_all(table: Path) -> None:
    """Each in one commit, of which the former version stays readable."""
    add_files(str(table), write(table, "2.parquet", d="stored"), 0, FILES, {})
    add_files(str(table), write(table, "3.parquet", e="stored"), 1, FILES, {}, replaces_all=True)
    assert [sorted(outcomes_of(table, version)) for version in range(3)] == [list("abc"), list("abcd"), ["e"]]


def test_rows_are_replaced_by_key(table: Path) -> None:
    """Files without such a row stay; the change data feed has the changed rows alone, and PyArrow reads all files."""
    changed = rows(b="deleted", d="stored", **{"it's": "stored"})
    replace_few_rows(str(table), 0, changed, "path", changed["path"].combine_chunks())
    assert outcomes_of(table) == {"a": "stored", "b": "deleted", "c": "stored", "d": "stored", "it's": "stored"}
    assert "1.parquet" in deltalake_files(table, version=1)
    feed = pa.concat_tables([pq.read_table(file) for file in (table / "_change_data").glob("*.parquet")])
    found = set(
        zip(feed["path"].to_pylist(), feed["outcome"].to_pylist(), feed["_change_type"].to_pylist(), strict=True)
    )
    inserted = {("b", "deleted", "insert"), ("d", "stored", "insert"), ("it's", "stored", "insert")}
    assert found == {("b", "stored", "delete"), *inserted}
    replace_few_rows(str(table), 1, rows(), "path", pa.array(["a", "it's"]))
    assert sorted(outcomes_of(table)) == ["b", "c", "d"]


def test_commit_to_a_later_version_is_a_conflict(table: Path, monkeypatch) -> None:
    """Another program commits before the table is opened or after it, and be it an append."""
    changed = rows(b="deleted")
    for work in (
        lambda: add_files(str(table), {"0.parquet": 2}, 0, FILES, {}),
        lambda: replace_few_rows(str(table), 0, changed, "path", changed["path"].combine_chunks()),
    ):
        commit = direct_commits.commit

        def late(path, function, commit=commit):
            write_deltalake(table, rows(z="stored"), mode="append")
            return commit(path, function)

        monkeypatch.setattr(direct_commits, "commit", late)
        with pytest.raises(TableChanged, match="another program wrote to"):
            work()
        monkeypatch.setattr(direct_commits, "commit", commit)
        with pytest.raises(TableChanged, match="another program wrote to"):
            work()
        assert outcomes_of(table, 0) == {"a": "stored", "b": "stored", "c": "stored"}
        DeltaTable(table).restore(0)
        for number in range(DeltaTable(table).version(), 0, -1):
            (table / "_delta_log" / f"{number:020}.json").unlink()


def change_partitions(table: Path) -> None:
    """Partition a table by another column."""
    again = DeltaTable(table).to_pyarrow_table()
    write_deltalake(table, again, mode="overwrite", schema_mode="overwrite", partition_by=["outcome"])


@pytest.mark.parametrize(
    "change",
    [
        change_partitions,
        lambda table: DeltaTable(table).alter.add_constraint({"small": "size < 10"}),
        lambda table: DeltaTable(table).alter.add_feature(
            deltalake.table.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
        ),
        lambda table: DeltaTable(table).alter.add_feature(
            deltalake.table.TableFeatures.ColumnMapping, allow_protocol_versions_increase=True
        ),
    ],
    ids=["partitions", "constraint", "deletion vectors", "column mapping"],
)
def test_table_that_another_program_changed_is_left_to_spark(table: Path, change) -> None:
    """Such a file would have a null in the partition column, or would not be what the protocol asks for."""
    change(table)
    version, files = DeltaTable(table).version(), write(table, "2.parquet", d="stored")
    with pytest.raises(NeedsSpark):
        add_files(str(table), files, version, FILES, {})
    with pytest.raises(NeedsSpark):
        replace_few_rows(str(table), version, rows(a="deleted"), "path", pa.array(["a"]))
    assert DeltaTable(table).version() == version


def test_generated_column_is_left_to_spark(tmp_path: Path) -> None:
    """A file that lacks the rule of such a column could break it."""
    rule = {"delta.generationExpression": "upper(path)"}
    schema = StructType([StructField("path", StringType(), metadata=rule)])
    DeltaTable.create(tmp_path, deltalake.Schema.from_json(schema.json()))
    with pytest.raises(NeedsSpark):
        add_files(str(tmp_path), {}, 0, schema, {})


def test_folder_without_hard_links_is_left_to_spark(table: Path, monkeypatch) -> None:
    """delta-rs commits by a hard link, which some file systems lack; the probe leaves nothing."""

    def refuse(*_given: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    before = sorted(table.iterdir())
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(NeedsSpark):
        add_files(str(table), {"0.parquet": 2}, 0, FILES, {})
    with pytest.raises(NeedsSpark):
        replace_few_rows(str(table), 0, rows(), "path", pa.array(["a"]))
    assert sorted(table.iterdir()) == before


def test_many_keys_and_large_files_are_left_to_spark(table: Path, monkeypatch) -> None:
    """The driver neither writes large files again, nor a condition of any length into the log."""
    monkeypatch.setattr(direct_commits, "MAX_KEYS", 1)
    with pytest.raises(NeedsSpark):
        replace_few_rows(str(table), 0, rows(), "path", pa.array(["a", "b"]))
    monkeypatch.setattr(direct_commits, "DRIVER_BYTES", 1)
    with pytest.raises(NeedsSpark):
        replace_few_rows(str(table), 0, rows(), "path", pa.array(["a"]))
    assert DeltaTable(table).version() == 0


def test_only_files_with_the_rows_are_found(tmp_path: Path) -> None:
    """Files with the values are found in the requested version, without Spark for a local table."""
    for name in ("ab", "cd", "ef"):
        write_deltalake(tmp_path.as_uri(), pa.table({"path": list(name), "size": [1, 2]}), mode="append")
    ((first,),) = [deltalake_files(tmp_path, version=0)]
    table = TableRef(path=str(tmp_path), version=2)
    found = files_containing(table, "path", pa.array(["b", "e", "no"]))
    assert len(found) == 2
    assert first in found
    assert files_containing(table.model_copy(update={"version": 0}), "path", pa.array(["e"])) == []


def deltalake_files(folder: Path, version: int) -> list[str]:
    """Return the names of the files of a version."""
    return pa.table(DeltaTable(folder.as_uri(), version=version).get_add_actions())["path"].to_pylist()


def test_table_with_newer_features_is_left_to_spark(tmp_path: Path) -> None:
    """delta-rs refuses it by the error of a conflict, although nobody wrote to the table meanwhile."""
    path = tmp_path / "table"
    write_deltalake(path, pa.table({"a": [1]}))
    features = ["rowTracking", "domainMetadata"]
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": features}
    (path / "_delta_log" / f"{1:020}.json").write_text(json.dumps({"protocol": protocol}))

    with pytest.raises(NeedsSpark):
        append_rows(str(path), pa.table({"a": [2]}))

    assert DeltaTable(path).version() == 1
