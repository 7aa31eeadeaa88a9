"""Queries on rows in Parquet files, and temporary files of rows."""

import errno
import gc
import os
import signal
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.errors import QueryTooLarge
from tasks.storage import Storage
from tasks.tables import parquet_rows
from tasks.tables import relations as module
from tasks.tables.parquet_rows import ParquetRows, spool_rows
from tasks.tables.relations import Relations

SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)
THEN = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def table_of(*paths: str) -> pa.Table:
    """Return rows with these paths."""
    return pa.table(
        {"path": paths, "size": range(len(paths)), "at": [THEN + timedelta(days=1)] * len(paths)}, schema=SCHEMA
    )


@pytest.mark.parametrize("way", ["run", "rows", "batches"])
def test_exception_of_a_signal_ends_a_query_and_is_raised(storage: Storage, way: str) -> None:
    """DuckDB itself would raise a RuntimeError in its place, and a cancelled stage would be retried."""

    class Cancelled(BaseException):
        pass

    def cancel(_number: int, _frame: object) -> None:
        raise Cancelled

    long = "SELECT count(*) AS size FROM range(1000000000000) WHERE range % 7 = 1"
    schema = pa.schema([("size", pa.int64())])
    before = signal.signal(signal.SIGALRM, cancel)
    try:
        with Relations(storage) as relations:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Cancelled):
                list(relations.batches(long, schema)) if way == "batches" else getattr(relations, way)(long)
            assert relations.rows("SELECT 1") == [(1,)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class CallsOfMainThread:
    """A database, and the names of its functions that the main thread calls."""

    def __init__(self, database: duckdb.DuckDBPyConnection) -> None:
        self._database = database
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._database, name)

        def call(*values: Any, **named: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.names.add(name)
            return function(*values, **named)

        return call


def test_database_reads_rows_in_another_thread(storage: Storage, tmp_path: Path) -> None:
    """It replaces an exception of a signal in what it calls: the schema of registered rows, or a query."""
    table = table_of("a", "b")
    with Relations(storage) as relations:
        watched = CallsOfMainThread(relations._database)
        relations._database = watched
        relations.add("memory", table)
        relations.add("files", spool_rows(iter(table.to_batches()), SCHEMA, tmp_path))
        relations.add("empty", SCHEMA.empty_table())
        relations.run("CREATE TABLE made AS FROM memory; CREATE TABLE copied AS FROM files")
        assert relations.rows("SELECT count(*) FROM made JOIN copied USING (path)") == [(2,)]
        assert relations.table("FROM memory ORDER BY path", SCHEMA) == table
    assert watched.names == {"extract_statements", "close"}


@pytest.mark.parametrize("name", ["a.parquet", "a [b]*?.parquet", "it's.parquet", "key=1/a.parquet"])
def test_rows_in_files_of_any_name_are_those_of_a_table(storage: Storage, tmp_path: Path, name: str) -> None:
    """A query of files gives the rows of a table in memory; special characters of the name have no meaning."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "a b.parquet").write_bytes(b"a file that a pattern would match")
    pq.write_table(table_of("x", "y"), tmp_path / name)
    with Relations(storage) as relations:
        relations.add("found", ParquetRows((str(tmp_path / name),), SCHEMA))
        assert relations.table("FROM found ORDER BY path", SCHEMA).equals(table_of("x", "y"))


def test_older_files_lack_columns_and_have_times_of_the_older_type(storage: Storage, tmp_path: Path) -> None:
    """A column that a file lacks is null, columns may have any order, and times without a time zone are in UTC."""
    old, new = tmp_path / "old.parquet", tmp_path / "new.parquet"
    pq.write_table(table_of("x").select(["at", "path"]), old, use_deprecated_int96_timestamps=True)
    pq.write_table(table_of("y", "z").append_column("more", pa.array([1, 2])), new)
    for files in ((old, new), (new, old)):
        with Relations(storage) as relations:
            relations.add("found", ParquetRows(tuple(map(str, files)), SCHEMA))
            rows = relations.table("FROM found ORDER BY path", SCHEMA).to_pylist()
        assert [(row["path"], row["size"]) for row in rows] == [("x", None), ("y", 0), ("z", 1)]
        assert {row["at"] for row in rows} == {THEN + timedelta(days=1)}


def test_only_rows_with_the_values_count(storage: Storage, tmp_path: Path) -> None:
    """The columns of the condition need not be among those of the rows; no files have no rows."""
    pq.write_table(table_of("x", "it's"), tmp_path / "a.parquet")
    schema = pa.schema([("size", pa.int64())])
    files = (str(tmp_path / "a.parquet"),)
    with Relations(storage) as relations:
        relations.add("found", ParquetRows(files, schema, {"path": "it's"}))
        relations.add("none_so_small", ParquetRows(files, schema, {"path": "it's", "size": 0}))
        relations.add("none", ParquetRows((), SCHEMA))
        assert relations.rows("FROM found") == [(1,)]
        assert relations.rows("FROM none_so_small") == []
        assert relations.table("FROM none", SCHEMA).equals(SCHEMA.empty_table())


def open_files(folder: Path) -> list[str]:
    """Return the open files of this process in a folder, also deleted ones; threads of other tests have files, too."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # It was closed meanwhile.
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(str(folder))]


def test_temporary_rows_have_no_name_and_end_with_their_owner(storage: Storage, tmp_path: Path) -> None:
    """The disk space is free once neither the rows nor a database with them exist, also after a kill."""
    batches = [*table_of("x", "y").to_batches(), *table_of("x").to_batches()]
    rows = spool_rows(iter(batches), SCHEMA, tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert len(open_files(tmp_path)) == 1
    assert (rows.num_rows, rows.table().num_rows) == (3, 3)
    assert rows.counts("path") == {"x": 2, "y": 1}
    with Relations(storage) as relations:
        relations.add("found", rows)
        del rows
        gc.collect()
        assert relations.rows("SELECT count(*), sum(size) FROM found") == [(3, 1)]
        assert open_files(tmp_path)
    del relations
    gc.collect()
    assert open_files(tmp_path) == []


def test_batches_are_collected_into_large_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group has at least GROUP_ROWS rows but for the last, however few rows each batch has."""
    monkeypatch.setattr(parquet_rows, "GROUP_ROWS", 10)
    batches = table_of(*map(str, range(25))).to_batches(max_chunksize=4)
    rows = spool_rows(iter(batches), SCHEMA, tmp_path / "scratch")
    with pq.ParquetFile(rows.files[0]) as file:
        assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [12, 12, 1]
    assert rows.table().equals(pa.Table.from_batches(batches).combine_chunks())


def test_query_that_cannot_spill_ends_with_an_error_for_users(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the rows, the limit and the way out, and the error is not retried."""
    monkeypatch.setattr(module, "MEMORY", "50MB")
    query = "SELECT length(list(sha256(i::VARCHAR))) FROM range(1_000_000) s(i)"
    expected = "a query on found needs more memory than its limit of 50MB.*: ingest fewer new files per run, or raise"
    with Relations(storage) as relations:
        relations.add("found", table_of("x"))
        with pytest.raises(QueryTooLarge, match=expected):
            relations.rows(query)


def test_queries_above_the_memory_limit_spill(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of twice the memory succeeds on the disk; without space there, the error is that of a full disk."""
    monkeypatch.setattr(module, "MEMORY", "150MB")
    query = "CREATE TABLE t AS SELECT hash(i) AS a, sha256(i::VARCHAR) AS b FROM range(3_000_000) s(i) ORDER BY a"
    with Relations(storage) as relations:
        relations.run(query)
        assert relations.rows("SELECT count(*) FROM t") == [(3_000_000,)]
    with Relations(storage) as relations:
        relations.run("SET max_temp_directory_size = '1MB'")
        with pytest.raises(OSError, match="No space left on device") as raised:
            relations.run(query)
    assert raised.value.errno == errno.ENOSPC
