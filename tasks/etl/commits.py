"""Bring the tables `images` and `files` in line with the outcomes: two commits at most, and one."""

from collections.abc import Iterable, Mapping

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.etl.outcomes import Comparison
from tasks.etl.staging import choose_parts
from tasks.refs import TableRef
from tasks.schema import FILES, IMAGES
from tasks.tables import delta, snapshots
from tasks.tables.cut import cut_images, cut_ledger
from tasks.tables.parts import PartTarget

# A model's version of the data stays readable as long as the model is there, not the 30 days of Delta's default;
# maintenance keeps its files, this keeps the log that names them.
KEEP_LOG = {"delta.logRetentionDuration": "interval 36500 days"}

IMAGES_PROPERTIES = {"delta.enableChangeDataFeed": "true", **KEEP_LOG}


def write_images(
    spark: SparkSession, target: PartTarget, version: int | None, compared: Comparison, values: Mapping[str, str]
) -> None:
    """Insert images that are stored now and not there yet, delete those that no file and no kept image stands for.

    The parts that the workers wrote are committed as they lie there. What is to be deleted is taken out in a commit
    before it: of the files that were there only those that hold it are written again. A commit that does both would
    copy every new image into the change data feed; so does the one that takes out, for the parts with an image that
    moved. A run killed between the two leaves a table that the next run completes.

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
                # Whole files go and whole files come: Delta derives the feed from their names, and one commit does.
                delta.commit_files(spark, path, new, version, IMAGES, values, cut.removed)
                return
            delta.commit_files(spark, path, parts.moved | cut.added, version, IMAGES, values, cut.removed, cut.changes)
        version += 1
    if version is None or new:
        delta.commit_files(spark, path, new, version, IMAGES, {**values, **IMAGES_PROPERTIES})


def _merge_images(spark: SparkSession, path: str, version: int, surplus: pa.Table, parts: Iterable[str]) -> None:
    """Take rows out of a table whose files cannot be replaced, and insert those of the parts that take their place."""
    files = [f"{path}/{name}" for name in parts]
    insert = spark.read.schema(IMAGES).parquet(*files) if files else spark.createDataFrame([], IMAGES)
    gone = spark.createDataFrame(surplus)
    change = insert.withColumn("gone", F.lit(False)).unionByName(
        # An image that moved to another class folder or split is deleted as what it was and inserted as what it is:
        # one row of the merge must do both, so the insert updates.
        gone.join(insert, on="sha256", how="left_anti").withColumn("gone", F.lit(True)),
        allowMissingColumns=True,
    )
    values_of_s = {field.name: f"s.{field.name}" for field in IMAGES}
    delta.check_version(spark, path, version)
    with delta.conflict_named(path):
        (
            delta.merge(spark, path, change, ("sha256",))
            .whenMatchedDelete("s.gone")
            .whenMatchedUpdate("NOT s.gone", values_of_s)
            .whenNotMatchedInsert("NOT s.gone", values_of_s)
            .execute()
        )


def _files_to_replace(spark: SparkSession, path: str, version: int, rows: pa.Table, key: str) -> list[str] | None:
    """Return the names of the files with rows of these keys; None where only a MERGE can replace them."""
    if not delta.can_replace_files(spark, path):
        return None
    files = snapshots.files_with(spark, TableRef(path=path, version=version), key, rows[key].combine_chunks())
    filesystem, root = fsspec.core.url_to_fs(path)
    # In a clone, files are those of another table.
    return files if all(filesystem.exists(f"{root}/{name}") for name in files) else None


def write_files(
    spark: SparkSession, target: PartTarget, version: int | None, compared: Comparison, values: Mapping[str, str]
) -> None:
    """Bring the ledger in line with the outcomes; a file that is gone is called deleted.

    Where no row of it changes, the new ones are a file that is committed as it lies there; else only the files with
    rows that change are written again.

    Raises:
        TableChanged: Another program wrote to the ledger, which was at `version`.
    """
    path = target.folder
    changes, all_new = compared.ledger_changes(target.ingested_at)
    if version is not None and not changes.num_rows:
        return
    if version is not None and not all_new:
        fed = delta.has_change_feed(spark, path)
        holding = None if fed else _files_to_replace(spark, path, version, changes, "path")
        if holding is not None:
            cut = cut_ledger(target, holding, changes)
            delta.commit_files(spark, path, cut.added, version, FILES, values, cut.removed)
            return
        rows = spark.createDataFrame(changes)
        delta.check_version(spark, path, version)
        with delta.conflict_named(path):
            delta.merge(spark, path, rows, ("path",)).whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
        return
    name = target.new_name()
    filesystem, root = fsspec.core.url_to_fs(path)
    with filesystem.open(f"{root}/{name}", "wb") as file:
        pq.write_table(changes, file, compression="zstd")
    delta.commit_files(spark, path, {name: changes.num_rows}, version, FILES, values)
