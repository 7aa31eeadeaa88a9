"""SQL on relations of the driver, with DuckDB: Arrow tables in memory, and rows in Parquet files.

It is meant for names, times and hashes, a few hundred bytes per file, and not for pixels. Spark takes seconds to plan
and compile queries that DuckDB runs in milliseconds, on several cores. Above MEMORY, queries spill to the disk.
"""

import errno
import glob
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self, TypeVar

import duckdb
import pyarrow as pa

from tasks.errors import QueryTooLarge
from tasks.spark.scratch import Scratch, scratch_root
from tasks.storage import Storage
from tasks.system.cores import num_cores
from tasks.system.signals import run_uninterrupted
from tasks.tables.parquet_rows import ParquetRows

T = TypeVar("T")

MEMORY = "768MB"
"""Memory of a database; the driver's limit of 2 GB at ten million files includes Python and the results of queries."""

MAX_THREADS = 6
"""Threads of a database: each needs 125 MB to spill."""

BATCH_ROWS = 100_000
"""Rows of a batch of a query's result."""


class Relations:
    """DuckDB database of named rows, and of views and tables derived from them."""

    def __init__(self, storage: Storage) -> None:
        """Open an empty database; it spills to the temporary files of the home."""
        self._scratch = Scratch(scratch_root(storage))
        self._rows: dict[str, pa.Table | ParquetRows] = {}
        settings: dict[str, str | bool | int | float | list[str]] = {
            "temp_directory": str(self._scratch.folder / "duckdb"),
            "memory_limit": MEMORY,
            "threads": min(num_cores(), MAX_THREADS),
            # The right side of a join, as it is written, becomes the hash table. DuckDB takes a Parquet file that it
            # reads with a given schema for one row, and would choose the one of ten million rows.
            "disabled_optimizers": "join_order,build_side_probe_side",
            "preserve_insertion_order": "false",  # otherwise tables are built from buffers of all their rows
            # DuckDB must not download extensions: none is needed.
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        try:
            self._database = duckdb.connect(config=settings)
            # Parquet's older type of times, which Spark writes, has no time zone.
            self.run("SET TimeZone = 'UTC'")
        except Exception:
            self._scratch.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._database.close()
        self._scratch.remove()

    def add(self, name: str, rows: pa.Table | ParquetRows) -> None:
        """Add rows under a name, without a copy."""
        self._rows[name] = rows  # a temporary file lasts as long as its rows
        is_empty = not (rows.files if isinstance(rows, ParquetRows) else rows.num_rows)
        if is_empty:  # as such part of the query's text, so that joins with it are left out
            nulls = ", ".join(f'NULL::{kind} AS "{column}"' for column, kind in self._types(rows.schema).items())
            self.run(f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT {nulls} WHERE false")
        elif isinstance(rows, ParquetRows):
            self.run(f"CREATE OR REPLACE TEMP VIEW {name} AS {self._scan(rows)}")
        else:
            self.run(f"DROP VIEW IF EXISTS {name}")
            self._call(lambda: self._database.register(name, rows))

    def _types(self, schema: pa.Schema) -> dict[str, Any]:
        """Return DuckDB's type of each column."""
        types = self._call(lambda: self._database.from_arrow(schema.empty_table()).types)
        return dict(zip(schema.names, types, strict=True))

    def _scan(self, rows: ParquetRows) -> str:
        """Return a query of the rows; the text has all names, since a view has no parameters."""
        types = self._types(rows.schema)
        read = {field.name: field.type for field in rows.schema if field.name not in rows.fixed}
        read |= {name: pa.scalar(value).type for name, value in rows.where.items()}
        columns = ", ".join(
            f"{_text(name)}: {{name: {_text(name)}, type: {_text(str(kind))}, default_value: NULL}}"
            for name, kind in self._types(pa.schema(read)).items()
        )
        files = ", ".join(_text(glob.escape(file)) for file in rows.files)
        names = ", ".join(
            f'{_literal(rows.fixed[name])}::{kind} AS "{name}"' if name in rows.fixed else f'"{name}"'
            for name, kind in types.items()
        )
        wanted = " AND ".join(f'"{name}" = {_literal(value)}' for name, value in rows.where.items())
        return (
            f"SELECT {names} FROM read_parquet([{files}], hive_partitioning = false, schema = MAP {{{columns}}})"  # noqa: S608  # quoted below
            f"{' WHERE ' if wanted else ''}{wanted}"
        )

    def run(self, script: str, values: dict[str, Any] | None = None) -> None:
        """Run the statements of a script, whose results are dropped, with their parameters ($name) from `values`."""
        for statement in self._database.extract_statements(script):
            own = {name: value for name, value in (values or {}).items() if name in statement.named_parameters}
            self._call(partial(self._database.execute, statement, own))

    def rows(self, query: str, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._call(lambda: self._database.execute(query, values).fetchall())

    def table(self, query: str, schema: pa.Schema) -> pa.Table:
        """Return the rows of a query, cast to this schema; times are in UTC, independent of the local time zone."""
        return pa.Table.from_batches(self.batches(query, schema), schema)

    def batches(self, query: str, schema: pa.Schema, values: dict[str, Any] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query in batches, cast to this schema, before another query is run."""
        found: Any = self._call(lambda: self._database.sql(query, params=values).to_arrow_reader(BATCH_ROWS))
        while (batch := self._call(lambda: next(found, None))) is not None:
            yield from pa.Table.from_batches([batch]).cast(schema).to_batches()

    def _call(self, function: Callable[[], T]) -> T:
        """Call DuckDB in a thread: in the main one, it replaces the exception of a signal by one of its own.

        Raises:
            OSError: The disk has no space for what does not fit into memory.
            QueryTooLarge: A part of a query that cannot spill does not fit into memory.
        """
        try:
            return run_uninterrupted(function, self._database.interrupt)
        except duckdb.OutOfMemoryException as error:
            # DuckDB's limit is a share of the free space.
            if "max_temp_directory_size" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._scratch.folder)) from error
            raise QueryTooLarge(
                f"a query on {', '.join(sorted(self._rows))} needs more memory than its limit of {MEMORY}, although it "
                "spills to the disk",
                way_out="ingest fewer new files per run, or raise MEMORY in tasks/tables/relations.py",
            ) from error


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _literal(value: str | int) -> str:
    return _text(value) if isinstance(value, str) else str(int(value))
