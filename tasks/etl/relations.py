"""Relations in the driver's memory, and SQL on them.

For what is about names, times and hashes, a few hundred bytes a file and no pixels: Spark takes seconds to plan and
compile what DuckDB does with them in milliseconds, on all cores, and on disk where memory is short.
"""

import tempfile
from typing import Any, Self

import duckdb
import pyarrow as pa
from pyspark.sql import SparkSession


class Relations:
    """Arrow tables by name, views and tables made of them, and what SQL says of them."""

    def __init__(self, spark: SparkSession | None = None) -> None:
        """Start without any.

        Args:
            spark: The session below whose temporary files lie those of what memory does not hold.
        """
        folder = None if spark is None else spark.conf.get("spark.local.dir", None)
        # It fetches no extension by itself, and times leave it as they came.
        settings = {
            "temp_directory": folder or tempfile.gettempdir(),
            "autoinstall_known_extensions": "false",
            "TimeZone": "UTC",
        }
        self._database = duckdb.connect(config=dict(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._database.close()

    def add(self, name: str, rows: pa.Table) -> None:
        """Give an Arrow table a name; it is not copied."""
        self._database.register(name, rows)

    def run(self, statement: str, values: dict[str, Any] | None = None) -> None:
        """Run a statement that returns nothing, its parameters ($name) taken from `values`."""
        self._database.execute(statement, values)

    def rows(self, query: str, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._database.execute(query, values).fetchall()

    def table(self, query: str, schema: pa.Schema) -> pa.Table:
        """Return the rows of a query, cast to these columns."""
        rows: Any = self._database.sql(query).to_arrow_table()
        return rows.cast(schema)
