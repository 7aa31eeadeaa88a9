"""Writes of the ETL: at most two commits to the table `images`, and one to the table `files`."""

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from tasks.etl.outcomes import Comparison, LedgerChanges
from tasks.etl.staging import choose_parts
from tasks.object_store import file_system
from tasks.schema import FILES, FILES_ARROW, IMAGES, IMAGES_ARROW
from tasks.spark.file_systems import has_other_log_store
from tasks.spark.session import NeedsSpark
from tasks.tables import delta
from tasks.tables.direct_commits import add_files, replace_few_rows
from tasks.tables.parts import PartTarget, read_rows
from tasks.tables.rewriting import are_small

# The table version that a model was trained from stays readable for as long as the model exists. Maintenance keeps its
# data files; this setting keeps the log that names them, which Delta removes after 30 days by default.
KEEP_LOG = {"delta.logRetentionDuration": "interval 36500 days"}

IMAGES_PROPERTIES = {"delta.enableChangeDataFeed": "true", **KEEP_LOG}


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
    parts, surplus = choose_parts(spark, compared, target), compared.surplus()
    new = parts.new
    if version is not None and surplus.num_rows:
        is_whole = surplus.num_rows == compared.num_existing()
        if is_whole and _replace_all(spark, target, parts.moved | new, version, values):
            return
        _replace_images(spark, target, version, surplus, parts.moved)
        version += 1
    if version is None or new:
        _add(spark, target, new, version, IMAGES, {**values, **IMAGES_PROPERTIES})


def _replace_all(
    spark: SparkSession, target: PartTarget, parts: Mapping[str, int], version: int, values: Mapping[str, str]
) -> bool:
    """Replace all images by these parts, so that no reader sees an empty table; return whether this is possible."""
    try:
        _check_log_store(spark, target.folder)
        add_files(target.folder, parts, version, IMAGES, values, replaces_all=True)
    except NeedsSpark:
        return False
    return True


def _check_log_store(spark: SparkSession, path: str) -> None:
    """Check that commits of delta-rs and those of other programs exclude each other.

    Raises:
        NeedsSpark: The user has set another log store, which delta-rs does not use.
    """
    if has_other_log_store(spark, path):
        raise NeedsSpark


def _add(
    spark: SparkSession,
    target: PartTarget,
    files: Mapping[str, int],
    version: int | None,
    schema: StructType,
    values: Mapping[str, str],
) -> None:
    """Commit files of `target`, without a copy where the table takes them as they are."""
    path = target.folder
    try:
        _check_log_store(spark, path)
        add_files(path, files, version, schema, values)
    except NeedsSpark:
        delta.append_files(spark, path, [f"{path}/{name}" for name in files], version, schema, values)


def _replace_images(
    spark: SparkSession, target: PartTarget, version: int, surplus: pa.Table, parts: Iterable[str]
) -> None:
    """Delete rows, and insert the rows of the parts, some of which replace them, in one commit."""
    path, gone = target.folder, surplus["sha256"].combine_chunks()
    if are_small(path, parts):
        rows = pa.Table.from_batches(read_rows(target, parts, IMAGES_ARROW), IMAGES_ARROW)
        keys = pa.concat_arrays([gone, *rows["sha256"].chunks]).unique()
        try:
            replace_few_rows(path, version, rows, "sha256", keys)
        except NeedsSpark:
            pass  # Spark writes it below, from the files themselves.
        else:
            return
    files = [f"{path}/{name}" for name in parts]
    insert = spark.read.schema(IMAGES).parquet(*files) if files else spark.createDataFrame([], IMAGES)
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
    name = target.new_name()
    filesystem, root = file_system(path)
    with (
        filesystem.open(f"{root}/{name}", "wb") as file,
        pq.ParquetWriter(file, FILES_ARROW, compression="zstd") as writer,
    ):
        for batch in changed.batches():
            writer.write_batch(batch)
    _add(spark, target, {name: changed.num_rows}, version, FILES, values)
