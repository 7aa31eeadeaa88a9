"""Commits by delta-rs, without Spark: of new rows, of files in a table's folder, and of rows in place of others.

Files and replaced rows are refused if another program gave the table what such files would lack, such as partitions.
"""

import errno
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from deltalake.exceptions import DeltaError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    PostCommitHookProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)
from pyspark.sql.types import StructType

from tasks.environment import s3_endpoint
from tasks.object_store import PROBE, file_system, has_conditional_puts
from tasks.paths import local_path
from tasks.refs import TableRef
from tasks.spark.session import NeedsSpark
from tasks.tables.delta import TRANSACTION, clear_uncommitted, mark_creation, newest_commit
from tasks.tables.parquet_rows import SpooledRows
from tasks.tables.properties import split_properties
from tasks.tables.snapshots import data_files, files_containing
from tasks.tables.writer import UNSUPPORTED, TableChanged, commit, is_unsure

DRIVER_BYTES = 64 << 20
"""Total size up to which the driver rewrites files itself: faster than the start of a Spark job, about 0.5 s."""

MAX_KEYS = 10_000
"""Number of keys up to which a condition names them: measured, 10,000 take 1.4 s, and are in the commit's file."""

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
"""Errors of file systems without hard links."""

CHANGE_FEED_WRITER = 4
"""Writer version of tables with a change data feed (PROTOCOL.md of Delta, "Table Features")."""

GROUP_BYTES = 16 << 20
"""Bytes of a row group of a file that is written again: the memory of a reader."""


def append_rows(
    path: str,
    rows: SpooledRows | pa.Table,
    properties: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
    transaction: tuple[str, int] | None = None,
) -> None:
    """Append rows to a table on a disk or on S3 in one commit; create the table, or add columns, where needed.

    The caller has an exclusive lock on the table. The rows do not have to fit into memory.

    Args:
        path: Path of the table.
        rows: The rows.
        properties: Properties of a new table.
        partition_by: Partition columns of a new table; an existing one keeps its own.
        transaction: Application and number by which a later writer knows that the rows are there.

    Raises:
        NeedsSpark: Only Spark can write the table.
    """
    location, options = location_of(path)
    if isinstance(rows, SpooledRows) and options and not has_conditional_puts(path.rsplit("/", 1)[0]):
        # The right to write has an end there, which only Spark's log store checks after many rows are written.
        raise NeedsSpark
    # delta-rs reads the batches in its own threads, in which no other table can be opened: hence from a file.
    data = rows if isinstance(rows, pa.Table) else pa.RecordBatchReader.from_batches(rows.schema, rows.batches())
    given: dict[str, Any] = {"mode": "append", "schema_mode": "merge"}
    given |= {"storage_options": options, "configuration": properties}
    if transaction is not None:
        given["commit_properties"] = CommitProperties(app_transactions=[Transaction(*transaction)])
    is_new = newest_commit(path) is None
    if is_new:
        given["partition_by"] = list(partition_by) or None
        clear_uncommitted(path)
        # Before the first file: without a log, files of a killed run would be taken for those of something else.
        mark_creation(path)
    try:
        with translate_unsupported():
            commit(path, lambda: deltalake.write_deltalake(location, data, **given))
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


def has_row(path: str, column: str, value: str) -> bool:
    """Return whether a table has a row with this value; False if it does not exist.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    is_it = pyarrow.dataset.field(column) == value
    return bool(stored_rows(path, pa.schema([(column, pa.string())]), [column], is_it).num_rows)


def stored_rows(
    path: str,
    schema: pa.Schema,
    columns: Sequence[str],
    where: pyarrow.dataset.Expression | None = None,
    partition: Mapping[str, str | int] | None = None,
) -> pa.Table:
    """Return rows of a table on a disk or on S3; none if it does not exist.

    Args:
        path: Path of the table.
        schema: Columns of its files.
        columns: Names of the columns to return.
        where: Condition of the rows; None for all.
        partition: Values of partition columns of the rows, which the files lack.

    Raises:
        NeedsSpark: Only Spark can read the table.
    """
    if newest_commit(path) is None:
        return schema.empty_table().select(columns)
    # By fsspec, as all files on stores: some servers answer a part of an object otherwise than delta-rs expects.
    filesystem, root = file_system(path)
    files = [f"{root}/{name}" for name in data_files(open_newest(path), partition)]
    return pyarrow.dataset.dataset(files, schema=schema, filesystem=filesystem).to_table(columns, where)


def open_newest(path: str) -> deltalake.DeltaTable:
    """Open an existing table with delta-rs; raises as `location_of`."""
    location, options = location_of(path)
    return deltalake.DeltaTable(location, storage_options=options)


def needs_spark(path: str) -> bool:
    """Return whether only Spark can read and write a table."""
    try:
        location_of(path)
    except NeedsSpark:
        return True
    return False


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


def _as_next_version(version: int | None) -> dict[str, Any]:
    """Return the arguments of a commit that is a conflict if another one became the version after `version`.

    It names the transaction of Spark's commits after the same version, which conflict with it, too. The log is kept:
    the table's own retention applies when Spark makes a checkpoint.
    """
    named = None if version is None else [Transaction(TRANSACTION, version + 1)]
    return {
        "commit_properties": CommitProperties(max_commit_retries=0, app_transactions=named),
        "post_commithook_properties": PostCommitHookProperties(cleanup_expired_logs=False),
    }


def takes_plain_files(table: deltalake.DeltaTable) -> bool:
    """Return whether a Parquet file with a table's columns can be added to it as it is.

    This is not so if another program gave the table partitions, constraints, generated columns, or features of the
    protocol such as column mapping and deletion vectors.
    """
    protocol, metadata = table.protocol(), table.metadata()
    is_plain = protocol.min_reader_version == 1 and protocol.min_writer_version <= CHANGE_FEED_WRITER
    fields = json.loads(table.schema().to_json())["fields"]
    return (
        is_plain
        and not metadata.partition_columns
        and not any(name.startswith("delta.constraints.") for name in metadata.configuration)
        and not any(name.startswith("delta.") for field in fields for name in field["metadata"])
    )


def add_files(
    path: str,
    files: Mapping[str, int],
    version: int | None,
    schema: StructType,
    values: Mapping[str, str],
    *,
    replaces_all: bool = False,
) -> None:
    """Commit Parquet files that are already in the table's folder; create the table if it does not exist.

    Args:
        path: Path or URL of the table.
        files: Names of the files, with their numbers of rows.
        version: The table's version that the rows are based on, None if the table did not exist.
        schema: Columns of the table and of the files.
        values: Properties of a new table.
        replaces_all: Whether all rows of the table are removed in the same commit.

    Raises:
        NeedsSpark: Only Spark can write the table.
        TableChanged: The table is at another version.
    """
    _check_links(path)
    columns = deltalake.Schema.from_json(schema.json())
    added = [_add_action(path, name, rows) for name, rows in files.items()]
    if version is None:
        location, options = location_of(path)
        properties, description = split_properties(values)
        given: dict[str, Any] = {"configuration": properties, "description": description, "storage_options": options}
        given |= _as_next_version(version)
        try:
            commit(path, lambda: create_table_with_add_actions(location, columns, added, **given))
        except DeltaError as error:
            if newest_commit(path) is not None:  # another driver created the table meanwhile
                raise TableChanged(path) from error
            raise
        return
    table, mode = _open(path, version), "overwrite" if replaces_all else "append"
    actions: list[AddAction | RemoveAction] = [*added]
    with translate_unsupported():
        commit(path, lambda: table.create_write_transaction(actions, mode, columns, **_as_next_version(version)))


def _check_links(path: str) -> None:
    """Check that a local folder has hard links, by which delta-rs commits; Spark renames.

    Raises:
        NeedsSpark: It has none, as some file systems in user space and FAT.
    """
    folder = local_path(path)
    if folder is None:
        return
    probes = [folder / f"{PROBE}{uuid4().hex}" for _ in range(2)]
    try:
        probes[0].touch()
        probes[1].hardlink_to(probes[0])
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        raise NeedsSpark from error
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


def _open(path: str, version: int) -> deltalake.DeltaTable:
    """Open a table that `takes_plain_files`.

    Raises:
        NeedsSpark: It does not, or delta-rs cannot read it.
        TableChanged: The table is at another version.
    """
    with translate_unsupported():
        table = open_newest(path)
    if table.version() != version:
        raise TableChanged(path)
    if not takes_plain_files(table):
        raise NeedsSpark
    return table


def _add_action(path: str, name: str, num_rows: int) -> AddAction:
    filesystem, root = file_system(path)
    modified = int(filesystem.modified(f"{root}/{name}").timestamp() * 1000)
    size = filesystem.info(f"{root}/{name}")["size"]
    return AddAction(name, size, {}, modified, data_change=True, stats=json.dumps({"numRecords": num_rows}))


def replace_few_rows(path: str, version: int, rows: pa.Table, key: str, keys: pa.Array) -> None:
    """Delete the rows with these keys, and insert `rows`, in one commit to a table in a local folder.

    The files that contain the rows are written again. The change data feed has exactly the deleted and inserted rows.

    Args:
        path: Path of the table.
        version: The table's version that the rows are based on.
        rows: Rows with the columns of the table, whose keys are among `keys`.
        key: A text column, the table's key.
        keys: Its values in the rows to delete.

    Raises:
        NeedsSpark: Only Spark can write the table; or there are many keys, or large files.
        TableChanged: The table is at another version.
    """
    folder = local_path(path)
    if folder is None or len(keys) > MAX_KEYS:  # The files of a table on a store are not sent through the driver.
        raise NeedsSpark
    _check_links(path)
    table = _open(path, version)
    files = files_containing(TableRef(path=path, version=version), key, keys)
    if rows.nbytes + sum((folder / name).stat().st_size for name in files) > DRIVER_BYTES:
        raise NeedsSpark
    # delta-rs reads a text without escapes, whose only special character is the quote.
    quoted = pc.binary_join_element_wise("'", pc.replace_substring(keys, "'", "''"), "'", "")
    condition = f"{key} IN ({', '.join(quoted.to_pylist())})"
    properties = deltalake.WriterProperties(compression="ZSTD", max_row_group_size=_group_rows(rows, table))
    given: dict[str, Any] = {"predicate": condition, "writer_properties": properties, **_as_next_version(version)}
    with translate_unsupported():
        commit(path, lambda: deltalake.write_deltalake(table, rows, mode="overwrite", **given))


def are_small(folder: str, names: Iterable[str]) -> bool:
    """Return whether the driver should process these files of a table itself."""
    filesystem, root = file_system(folder)
    # Not all sizes are asked for, of which each may be a request to a store.
    totals = accumulate(filesystem.size(f"{root}/{name}") for name in names)
    return all(total <= DRIVER_BYTES for total in totals)


def _group_rows(rows: pa.Table, table: deltalake.DeltaTable) -> int:
    """Return the number of rows that GROUP_BYTES hold on average."""
    added = pa.table(table.get_add_actions())
    num_rows = rows.num_rows + (pc.sum(added["num_records"]).as_py() or 0)
    num_bytes = rows.nbytes + (pc.sum(added["size_bytes"]).as_py() or 0)
    return int(max(1, num_rows * GROUP_BYTES // max(1, num_bytes)))
