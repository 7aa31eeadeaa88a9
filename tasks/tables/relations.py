"""SQL on in-memory relations of the driver, with DuckDB.

It is meant for names, times and hashes, a few hundred bytes per file, and not for pixels. Spark takes seconds to plan
and compile queries that DuckDB runs in milliseconds, on all cores, and with spilling to disk if memory is short.
"""

from typing import Any, Self

import duckdb
import pyarrow as pa

from tasks.spark.scratch import Scratch, scratch_root
from tasks.storage import Storage


class Relations:
    """DuckDB database of named Arrow tables, and of views and tables derived from them."""

    def __init__(self, storage: Storage) -> None:
        """Open an empty database; it spills to the temporary files of the home."""
        self._scratch = Scratch(scratch_root(storage))
        # DuckDB must not download extensions: none is needed.
        settings = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
        try:
            self._database = duckdb.connect(config={"temp_directory": str(self._scratch.folder / "duckdb"), **settings})
        except Exception:
            self._scratch.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._database.close()
        self._scratch.remove()

    def add(self, name: str, rows: pa.Table) -> None:
        """Register an Arrow table under a name, without a copy."""
        self._database.register(name, rows)

    def run(self, statement: str, values: dict[str, Any] | None = None) -> None:
        """Run a statement without a result, with its parameters ($name) from `values`."""
        self._database.execute(statement, values)

    def rows(self, query: str, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._database.execute(query, values).fetchall()

    def table(self, query: str, schema: pa.Schema, values: dict[str, Any] | None = None) -> pa.Table:
        """Return the rows of a query, cast to this schema; times are in UTC, independent of the local time zone."""
        rows: Any = self._database.sql(query, params=values).to_arrow_table()
        return rows.cast(schema)
