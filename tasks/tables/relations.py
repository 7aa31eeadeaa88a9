"""Relations in the driver's memory, and SQL on them.

For what is about names, times and hashes, a few hundred bytes a file and no pixels: Spark takes seconds to plan and
compile what DuckDB does with them in milliseconds, on all cores, and on disk where memory is short.
"""

from typing import Any, Self

import duckdb
import pyarrow as pa

from tasks.spark.scratch import Scratch, scratch_root
from tasks.storage import Storage


class Relations:
    """Arrow tables by name, views and tables made of them, and what SQL says of them."""

    def __init__(self, storage: Storage) -> None:
        """Start without any; what memory does not hold lies among the temporary files of the home."""
        self._scratch = Scratch(scratch_root(storage))
        # It fetches and loads no extension by itself: none is needed.
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
        """Give an Arrow table a name; it is not copied."""
        self._database.register(name, rows)

    def run(self, statement: str, values: dict[str, Any] | None = None) -> None:
        """Run a statement that returns nothing, its parameters ($name) taken from `values`."""
        self._database.execute(statement, values)

    def rows(self, query: str, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._database.execute(query, values).fetchall()

    def table(self, query: str, schema: pa.Schema, values: dict[str, Any] | None = None) -> pa.Table:
        """Return the rows of a query, cast to these columns; times in UTC, whatever the machine's zone."""
        rows: Any = self._database.sql(query, params=values).to_arrow_table()
        return rows.cast(schema)
