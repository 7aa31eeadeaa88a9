"""Writes of the ETL: at most two commits to the table `images`, and one to the table `files`."""

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.etl.outcomes import Comparison
from tasks.etl.staging import choose_parts
from tasks.object_store import file_system
from tasks.refs import TableRef
from tasks.schema import FILES, FILES_ARROW, IMAGES
from tasks.tables import delta, snapshots
from tasks.tables.cut import cut_images, cut_ledger
from tasks.tables.parts import PartTarget

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
    path, new = target.folder, parts.new
    if version is not None and surplus.num_rows:
        holding = _files_to_replace(spark, path, version, surplus, "sha256")
        if holding is None:
            _merge_images(spark, path, version, surplus, parts.moved)
        else:
            cut = cut_images(spark, target, holding, parts.moved, surplus, compared.moved())
            if not cut.added and not parts.moved:
                # Only whole files are removed and added: Delta derives the feed from them, and one commit suffices.
                delta.commit_files(spark, path, new, version, IMAGES, values, cut.removed)
                return
            delta.commit_files(spark, path, parts.moved | cut.added, version, IMAGES, values, cut.removed, cut.changes)
        version += 1
    if version is None or new:
        delta.commit_files(spark, path, new, version, IMAGES, {**values, **IMAGES_PROPERTIES})


def _merge_images(spark: SparkSession, path: str, version: int, surplus: pa.Table, parts: Iterable[str]) -> None:
    """Delete rows of a table whose files cannot be replaced, and insert the rows of the parts that replace them."""
    files = [f"{path}/{name}" for name in parts]
    insert = spark.read.schema(IMAGES).parquet(*files) if files else spark.createDataFrame([], IMAGES)
    delete = spark.createDataFrame(surplus)
    change = insert.withColumn("is_deleted", F.lit(False)).unionByName(
        # An image that moved to another class or split is deleted with its old values and inserted with the new ones.
        # One row of the merge must do both, so the insert is an update.
        delete.join(insert, on="sha256", how="left_anti").withColumn("is_deleted", F.lit(True)),
        allowMissingColumns=True,
    )
    values_of_s = {field.name: f"s.{field.name}" for field in IMAGES}
    delta.check_version(spark, path, version)
    with delta.translate_conflict(path):
        (
            delta.merge(spark, path, change, ("sha256",))
            .whenMatchedDelete("s.is_deleted")
            .whenMatchedUpdate("NOT s.is_deleted", values_of_s)
            .whenNotMatchedInsert("NOT s.is_deleted", values_of_s)
            .execute()
        )


def _files_to_replace(spark: SparkSession, path: str, version: int, rows: pa.Table, key: str) -> list[str] | None:
    """Return the names of the files that have rows with these keys; None if only a MERGE can replace the rows."""
    if not delta.can_replace_files(spark, path):
        return None
    files = snapshots.files_containing(spark, TableRef(path=path, version=version), key, rows[key].combine_chunks())
    filesystem, root = file_system(path)
    # The files of a shallow clone belong to another table.
    return files if all(filesystem.exists(f"{root}/{name}") for name in files) else None


def write_files(
    spark: SparkSession, target: PartTarget, version: int | None, compared: Comparison, values: Mapping[str, str]
) -> None:
    """Write the outcomes to the ledger (table `files`); files that are no longer in the source get outcome `deleted`.

    If no existing row changes, the new rows are written to one file and appended. Otherwise only the files with rows
    that change are rewritten.

    Raises:
        TableChanged: Another program wrote to the ledger, which was at `version`.
    """
    path = target.folder
    changed = compared.ledger_changes(target.ingested_at)
    if version is not None and not changed.num_rows:
        return
    if version is not None and not changed.all_new:
        changes = changed.table()
        has_feed = delta.has_change_feed(spark, path)
        holding = None if has_feed else _files_to_replace(spark, path, version, changes, "path")
        if holding is not None:
            cut = cut_ledger(target, holding, changes)
            delta.commit_files(spark, path, cut.added, version, FILES, values, cut.removed)
            return
        rows = spark.createDataFrame(changes)
        delta.check_version(spark, path, version)
        with delta.translate_conflict(path):
            delta.merge(spark, path, rows, ("path",)).whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
        return
    name = target.new_name()
    filesystem, root = file_system(path)
    with (
        filesystem.open(f"{root}/{name}", "wb") as file,
        pq.ParquetWriter(file, FILES_ARROW, compression="zstd") as writer,
    ):
        for batch in changed.batches():
            writer.write_batch(batch)
    delta.commit_files(spark, path, {name: changed.num_rows}, version, FILES, values)
