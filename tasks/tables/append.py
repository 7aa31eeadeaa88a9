"""Appending rows to a Delta table without Spark."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from tasks.environment import s3_endpoint
from tasks.object_store import file_system, has_conditional_puts
from tasks.paths import local_path
from tasks.spark.session import NeedsSpark
from tasks.tables.committing import UNSUPPORTED, commit, is_unsure
from tasks.tables.delta import clear_uncommitted, mark_creation, newest_commit
from tasks.tables.parquet_rows import SpooledRows


def append_rows(
    path: str,
    rows: SpooledRows | pa.Table,
    properties: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
) -> None:
    """Append rows to a table on a disk or on S3 in one commit; create the table, or add columns, where needed.

    The caller has an exclusive lock on the table. The rows do not have to fit into memory.

    Args:
        path: Path of the table.
        rows: The rows.
        properties: Properties of a new table.
        partition_by: Partition columns of a new table; an existing one keeps its own.

    Raises:
        NeedsSpark: Only Spark can write the table.
    """
    location, options = location_of(path)
    if isinstance(rows, SpooledRows) and options and not has_conditional_puts(path.rsplit("/", 1)[0]):
        # The right to write has an end there, which only Spark's log store checks after many rows are written.
        raise NeedsSpark
    given: dict[str, Any] = {"storage_options": options, "configuration": properties}
    is_new = newest_commit(path) is None
    if is_new:
        given["partition_by"] = list(partition_by) or None
        clear_uncommitted(path)
        # Before the first file: without a log, files of a killed run would be taken for those of something else.
        mark_creation(path)
    try:
        with translate_unsupported():
            commit(path, lambda: _append(location, rows, given))
    finally:
        if is_new and newest_commit(path) is None and not is_unsure(path):
            clear_uncommitted(path)


@contextmanager
def translate_unsupported() -> Iterator[None]:
    """Translate the errors of delta-rs about a table that it cannot write.

    Raises:
        NeedsSpark: Only Spark can write the table.
    """
    try:
        yield
    except DeltaError as error:
        if not any(text in str(error) for text in UNSUPPORTED):
            raise
        raise NeedsSpark from error


def _append(location: str, rows: SpooledRows | pa.Table, given: dict[str, Any]) -> None:
    if isinstance(rows, pa.Table):
        deltalake.write_deltalake(location, rows, mode="append", schema_mode="merge", **given)
        return
    with pq.ParquetFile(rows.files[0]) as file:
        # delta-rs reads the batches in its own threads, in which no other table can be opened: hence from a file.
        batches = pa.RecordBatchReader.from_batches(rows.schema, file.iter_batches())
        deltalake.write_deltalake(location, batches, mode="append", schema_mode="merge", **given)


def has_row(path: str, column: str, value: str) -> bool:
    """Return whether a table has a row with this value; False if it does not exist.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    if newest_commit(path) is None:
        return False
    location, options = location_of(path)
    table = deltalake.DeltaTable(location, storage_options=options)
    # By fsspec, as all files on stores: some servers answer a part of an object otherwise than delta-rs expects.
    filesystem, root = file_system(path)
    files = [f"{root}/{name}" for name in pa.table(table.get_add_actions())["path"].to_pylist()]
    rows = pyarrow.dataset.dataset(files, schema=pa.schema([(column, pa.string())]), filesystem=filesystem)
    return bool(rows.count_rows(filter=pyarrow.dataset.field(column) == value))


def location_of(path: str) -> tuple[str, dict[str, str]]:
    """Return the URL of a table and the options of its store for delta-rs; credentials come from the environment.

    Raises:
        NeedsSpark: delta-rs does not know the store.
    """
    folder = local_path(path)
    if folder is not None and "%" not in str(folder):  # delta-rs decodes a percent sign once too often
        return folder.absolute().as_uri(), {}
    if not path.startswith("s3a://"):
        raise NeedsSpark
    endpoint = s3_endpoint() or ""
    # A commit that another driver made meanwhile is not replaced: If-None-Match.
    options = {"aws_conditional_put": "etag", "aws_allow_http": str(endpoint.startswith("http://")).lower()}
    return f"s3://{path.removeprefix('s3a://')}", options
