"""Commits of each kind that a signal interrupts; twenty kills and interrupts of each kind are in tests/faults."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql.types import StringType, StructField, StructType

from tasks.config.storage import StorageConfig
from tasks.errors import LockLost, WrongInput
from tasks.etl.commits import staged_parts
from tasks.storage import resolve_storage
from tasks.system.locks import leased
from tasks.tables import delta, snapshots, writer
from tasks.tables.direct_commits import replace_few_rows
from tasks.tables.writer import LEASE_ENDED, TableChanged, commit, is_unsure
from tests.builders.etl_tables import ingest, stored
from tests.builders.interrupted_commits import KINDS, ROWS, tables_of, versions_of

pytestmark = pytest.mark.usefixtures("interrupted_by_sigterm")


@pytest.mark.parametrize("kind", ["create", "rewrite", "delete", "set_properties", "ingest", "replace"])
def test_interrupt_of_a_commit_is_raised_after_its_end(spark, storage, monkeypatch, kind):
    """The signal comes as soon as the commit has begun, which is whole then, or was not made."""
    KINDS[kind](spark, storage, 0)
    ended, commits = writer._ended, []

    def interrupt(path, work):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        try:
            return ended(path, work)
        finally:
            commits.append(path)

    monkeypatch.setattr(writer, "_ended", interrupt)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        KINDS[kind](spark, storage, 1)
    monkeypatch.setattr(writer, "_ended", ended)

    assert len(commits) == 1
    for table in tables_of(storage):
        assert not is_unsure(str(table))
        for version in versions_of(table):
            assert set(version.values()) <= {1}
            if table.name == "predictions":
                assert set(Counter(key.split("-")[0] for key in version).values()) <= {ROWS}
    KINDS[kind](spark, storage, 2)
    assert all(set(versions_of(table)[-1].values()) <= {1} for table in tables_of(storage))


def test_properties_of_a_table_whose_creation_was_killed_are_set_by_the_next_run(spark, source, tmp_path, monkeypatch):
    """Spark sets the properties of a new table in a second commit: they are those of the run that made the first."""
    storage = resolve_storage(StorageConfig(home=str(tmp_path / "a%20b")))  # delta-rs cannot write to such a path
    with monkeypatch.context() as patch:
        patch.setattr(delta, "_set_properties", lambda *_arguments: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            ingest(source, storage, stored_side=128)
    assert "lakevision.source" not in snapshots.newest_snapshot(spark, storage.table("images")).properties

    with pytest.raises(WrongInput, match="made with 128"):
        ingest(source, storage, stored_side=256)
    report = ingest(source, storage, stored_side=128)
    assert (report.stored, len(stored(spark, storage))) == (60, 60)
    assert report.images.source == str(source)


WRITERS = {
    "append": lambda spark, path, rows: delta.append_files(spark, path, [rows], 0, KEYS, {}),
    "merge": lambda spark, path, rows: delta.replace_rows(spark, path, 0, spark.read.parquet(rows), "sha256"),
    "direct": lambda _spark, path, rows: replace_few_rows(path, 0, pq.read_table(rows), "sha256", pa.array(["new"])),
}
KEYS = StructType([StructField("sha256", StringType())])


@pytest.mark.parametrize("first", WRITERS)
@pytest.mark.parametrize("second", ["append", "merge"])
def test_of_two_commits_after_the_same_version_one_is_a_conflict(spark, tmp_path, monkeypatch, first, second):
    """Without it, rows that two drivers insert would be there twice: Delta takes appends for independent."""
    path, rows = str(tmp_path / "table"), str(tmp_path / "rows.parquet")
    deltalake.write_deltalake(path, pa.table({"sha256": ["old"]}))
    pq.write_table(pa.table({"sha256": ["new"]}), rows)

    def commit_first(*_arguments) -> None:
        monkeypatch.undo()
        WRITERS[first](spark, path, rows)

    monkeypatch.setattr(delta, "check_version", commit_first)  # the version is checked, and then the other one commits
    with pytest.raises(TableChanged):
        WRITERS[second](spark, path, rows)
    assert versions_of(Path(path))[-1] == Counter(["old", "new"])


def test_no_file_is_removed_while_a_commit_may_be_under_way(tmp_path, monkeypatch):
    """The connection to a JVM that lives on is lost in the commit, which may name the parts; the next run looks."""
    path = str(tmp_path / "images")
    monkeypatch.setattr(writer, "jvm_is_alive", lambda: True)

    def lose() -> None:
        raise Py4JNetworkError("Answer from Java side is empty")

    def write_part_and(work) -> None:
        with staged_parts(path, None) as target:
            (tmp_path / "images" / target.new_name()).touch()
            commit(path, work)

    with pytest.raises(Py4JNetworkError):
        write_part_and(lose)
    assert is_unsure(path)
    assert len(list((tmp_path / "images").glob("*.parquet"))) == 1
    with pytest.raises(ZeroDivisionError):
        write_part_and(lambda: 1 // 0)
    assert not is_unsure(path)
    assert list((tmp_path / "images").glob("*.parquet")) == []


def test_commit_without_its_lease_is_not_begun(tmp_path):
    """A lease that ends while the commit is prepared is the reason that is given."""
    left, done = [1], []

    def check() -> None:
        if not left:
            raise LockLost("the exclusive lock was not renewed")

    def refused() -> None:
        left.clear()
        raise OSError(LEASE_ENDED)

    with leased(check):
        commit(str(tmp_path), lambda: done.append("before"))
        with pytest.raises(ZeroDivisionError):  # for which the lease is not the reason
            commit(str(tmp_path), lambda: left.clear() or 1 // 0)
        left.append(1)
        with pytest.raises(LockLost, match="was not renewed"):
            commit(str(tmp_path), refused)
        with pytest.raises(LockLost, match="was not renewed"):
            commit(str(tmp_path), lambda: done.append("after"))
    assert done == ["before"]


def test_internals_of_delta_are_where_they_are_called(spark):
    """A newer Delta that moves one of them fails here, and not in a run."""
    called = {
        "org.apache.spark.sql.delta.DeltaLog": ("forTable", "update", "getSnapshotAt", "dataPath"),
        "org.apache.spark.sql.delta.Snapshot": ("version", "metadata", "allFiles", "tombstones"),
        "org.apache.spark.sql.delta.actions.Metadata": ("id", "configuration", "description", "schemaString"),
    }
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    missing = {
        f"{name}.{method}"
        for name, methods in called.items()
        for method in methods
        if method not in {found.getName() for found in loader.loadClass(name).getMethods()}
    }
    assert missing == set(), f"Delta has no {missing}, which tasks/tables/delta_internals.py calls"
