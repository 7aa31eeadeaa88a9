"""Writes of the ETL: at most two commits to the table `images`, and one to the table `files`.

Workers write images into parts in the table's folder before they are committed. Parts that are not committed are
removed, also those of a killed run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from tasks.errors import WrongInput
from tasks.etl.outcomes import Comparison, LedgerChanges
from tasks.object_store import file_system, list_names
from tasks.schema import FILES, FILES_ARROW, IMAGES, IMAGES_ARROW
from tasks.spark.file_systems import has_other_log_store
from tasks.spark.session import NeedsSpark
from tasks.system.cores import num_cores
from tasks.system.locks import excludes_other_machines
from tasks.tables import delta
from tasks.tables.direct_commits import add_files, are_small, replace_few_rows
from tasks.tables.parts import REWRITTEN, Mapper, PartTarget, make_rewriter, read_rows, write_rows
from tasks.tables.writer import is_unsure

# The table version that a model was trained from stays readable for as long as the model exists. Maintenance keeps its
# data files; this setting keeps the log that names them, which Delta removes after 30 days by default.
KEEP_LOG = {"delta.logRetentionDuration": "interval 36500 days"}

IMAGES_PROPERTIES = {"delta.enableChangeDataFeed": "true", **KEEP_LOG}


MARKER = "_unfinished-"
"""Prefix of a marker file, with version and run: the run's parts in the table's folder may be uncommitted.

The marker is in the table's log folder, where readers of the table and VACUUM ignore it.
"""


@contextmanager
def staged_parts(path: str, version: int | None) -> Iterator[PartTarget]:
    """Yield the target for the parts of a run's workers; on exit, remove those that were not committed.

    The caller has an exclusive lock on the table, so on a local disk the parts of killed runs are removed, too. Where
    file locks do not exclude all writers, another run that wrote parts may be active: they are left to VACUUM.

    Args:
        path: Path or URL of the table.
        version: The table's version, None if it does not exist yet.
    """
    filesystem, root = file_system(path)
    target = PartTarget(path, uuid4().hex, datetime.now(UTC))
    if version is None:
        # Markers stay until this run ends: late tasks of a failed run may still write parts.
        delta.clear_uncommitted(path, keep=MARKER)
    filesystem.makedirs(f"{root}/_delta_log", exist_ok=True)
    _sweep(path, target.run, done=False, others=not is_unsure(path))
    try:
        filesystem.touch(f"{root}/_delta_log/{MARKER}{-1 if version is None else version}-{target.run}")
        yield target
    except WrongInput:
        _sweep(path, target.run, done=True)
        raise
    except BaseException:
        # Tasks of a failed job may still write for a moment: the marker stays for the next run. If the lock was lost,
        # another run may be writing parts of its own. A commit that may still be under way would name removed parts.
        if not is_unsure(path):
            _sweep(path, target.run, done=False, others=False)
        raise
    _sweep(path, target.run, done=True)


def is_swept(path: str) -> bool:
    """Return whether the table's log has no marker of a run, or `sweep_killed_runs` would leave them."""
    return not _markers(path) or not excludes_other_machines(path)


def _markers(path: str) -> list[str]:
    """Return the names of the marker files in the table's log."""
    return [name for name in list_names(f"{path}/_delta_log") if name.startswith(MARKER)]


def sweep_killed_runs(path: str) -> None:
    """Remove the uncommitted parts of killed runs from a local table that is up to date.

    They exist if a run's driver was killed and its JVM continued. The caller has an exclusive lock on the table.
    """
    if excludes_other_machines(path):
        _sweep(path, None, done=True)


def _sweep(path: str, own: str | None, *, done: bool, others: bool = True) -> None:
    """Remove uncommitted parts of this run and, on a local disk with `others`, of other runs.

    Args:
        path: Path or URL of the table.
        own: Name of this run; None if it writes no parts.
        done: Whether this run writes no more parts; if so, the markers are removed, too.
        others: Whether this run has the exclusive lock, so that parts of other runs are those of killed ones.
    """
    filesystem, root = file_system(path)
    for marker in _markers(path):
        version, run = marker.removeprefix(MARKER).rsplit("-", 1)
        if run != own and not (others and excludes_other_machines(path)):
            continue
        committed = delta.added_since(path, None if version == "-1" else int(version))
        for name in list_names(path):
            if f"-{run}-" in name and name not in committed:
                filesystem.rm(f"{root}/{name}")
        if done:
            filesystem.rm(f"{root}/_delta_log/{marker}")
    if done:
        delta.clear_uncommitted(path)


def _choose_parts(
    spark: SparkSession, compared: Comparison, target: PartTarget
) -> tuple[dict[str, int], dict[str, int]]:
    """Return parts that contain exactly the images to insert, with their numbers of rows.

    Parts with other images too (a duplicate in another part, a conflict, an image in the table) are rewritten without
    them. Parts with images whose assigned split differs from the split in the part are rewritten as well.

    Returns:
        Parts whose images are all new to the table, and parts with at least one image that the table has under another
        label or split.
    """
    (whole, edits), moving = compared.edits(), compared.parts_with_moved()
    done = [(part, rows, part) for part, rows in whole.items()]
    for batch in edits:
        again = pa.Table.from_batches([batch])
        rewritten = map_files(spark, target.folder, again, make_rewriter(target), REWRITTEN)
        done += [(row["part"], row["rows"], row["was"]) for row in rewritten]
    new, moved = ({part: rows for part, rows, was in done if (was in moving) == is_moved} for is_moved in (False, True))
    return new, moved


def map_files(spark: SparkSession, folder: str, files: pa.Table, mapper: Mapper, schema: str) -> list[dict[str, Any]]:
    """Return the rows that `mapper` yields for each row of `files`, in any order.

    Args:
        spark: The session.
        folder: Path or URL of the table.
        files: One row per file; the first column has its name relative to the folder.
        mapper: Called with one row at a time; in the driver, several threads call it concurrently.
        schema: Schema of the rows that it yields, as a DDL string.
    """
    if not are_small(folder, files.column(0).to_pylist()):
        frame = spark.createDataFrame(files).repartition(files.num_rows)
        return [row.asDict() for row in frame.mapInArrow(mapper, schema).collect()]
    batches = files.combine_chunks().to_batches(max_chunksize=1)
    with ThreadPoolExecutor(num_cores()) as pool:
        done = pool.map(lambda batch: [*mapper(iter([batch]))], batches)
        return [row for found in done for batch in found for row in batch.to_pylist()]


def write_images(
    spark: SparkSession, target: PartTarget, version: int | None, compared: Comparison, values: Mapping[str, str]
) -> None:
    """Insert new images, and delete those that no file of the source contains and that `etl.deleted` does not keep.

    The parts that the workers wrote are committed without a copy. Rows are deleted in a separate commit before it,
    which rewrites only the files that contain them. A single commit for both would copy every new image into the
    change data feed. Parts with an image that moved are in the first commit, and are copied there. If a run is killed
    between the two commits, the next run completes the table.

    Raises:
        TableChanged: Another program wrote to the table, which was at `version`.
    """
    (new, moved), surplus = _choose_parts(spark, compared, target), compared.surplus()
    if version is not None and surplus.num_rows:
        # Of a table that is replaced as a whole, no reader sees an empty version.
        is_whole = surplus.num_rows == compared.num_existing()
        add = partial(add_files, target.folder, moved | new, version, IMAGES, values, replaces_all=True)
        if is_whole and _commit_without_copy(spark, target.folder, add):
            return
        _replace_images(spark, target, version, surplus, moved)
        version += 1
    if version is None or new:
        _append(spark, target.folder, new, version, IMAGES, {**values, **IMAGES_PROPERTIES})


def _append(
    spark: SparkSession,
    path: str,
    files: Mapping[str, int],
    version: int | None,
    schema: StructType,
    values: Mapping[str, str],
) -> None:
    if not _commit_without_copy(spark, path, partial(add_files, path, files, version, schema, values)):
        delta.append_files(spark, path, [f"{path}/{name}" for name in files], version, schema, values)


def _commit_without_copy(spark: SparkSession, path: str, add: Callable[[], None]) -> bool:
    """Call `add_files` for a table; return whether this is possible.

    It is not where the user has set another log store, which delta-rs does not use: commits of delta-rs and those of
    other programs would not exclude each other.
    """
    if has_other_log_store(spark, path):
        return False
    try:
        add()
    except NeedsSpark:
        return False
    return True


def _replace_images(
    spark: SparkSession, target: PartTarget, version: int, surplus: pa.Table, parts: Iterable[str]
) -> None:
    """Delete rows, and insert the rows of the parts, some of which replace them, in one commit."""
    path, gone = target.folder, surplus["sha256"].combine_chunks()
    if are_small(path, parts):
        rows = pa.Table.from_batches(read_rows(target, parts, IMAGES_ARROW), IMAGES_ARROW)
        keys = pa.concat_arrays([gone, *rows["sha256"].chunks]).unique()
        with suppress(NeedsSpark):  # Spark writes it below, from the files themselves.
            replace_few_rows(path, version, rows, "sha256", keys)
            return
    files = [f"{path}/{name}" for name in parts]
    insert = spark.read.schema(IMAGES).parquet(*files) if files else delta.no_rows(spark, IMAGES)
    delta.replace_rows(spark, path, version, insert, "sha256", spark.createDataFrame(surplus))


def write_files(
    spark: SparkSession, target: PartTarget, version: int | None, changed: LedgerChanges, values: Mapping[str, str]
) -> None:
    """Write the outcomes to the ledger (table `files`); files that are no longer in the source get outcome `deleted`.

    If no existing row changes, the new rows are written to one file and appended. Otherwise only the files with rows
    that change are rewritten.

    Raises:
        TableChanged: Another program wrote to the ledger, which was at `version`.
    """
    path = target.folder
    if version is not None and not changed.num_rows:
        return
    if version is not None and not changed.all_new:
        rows = changed.table()
        try:
            replace_few_rows(path, version, rows, "path", rows["path"].combine_chunks())
        except NeedsSpark:
            delta.replace_rows(spark, path, version, spark.createDataFrame(rows), "path")
        return
    name = write_rows(changed.batches(), target, FILES_ARROW)
    _append(spark, path, {name: changed.num_rows}, version, FILES, values)
