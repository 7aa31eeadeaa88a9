"""Bring the tables `images` and `files` in line with the outcomes: at most one commit each."""

from collections.abc import Mapping

import fsspec
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.etl import delta
from tasks.etl.outcomes import Comparison
from tasks.etl.parts import PartTarget
from tasks.etl.staging import choose_parts
from tasks.schema import FILES, IMAGES

# A model's version of the data stays readable as long as the model is there, not the 30 days of Delta's default;
# maintenance keeps its files, this keeps the log that names them.
KEEP_LOG = {"delta.logRetentionDuration": "interval 36500 days"}

IMAGES_PROPERTIES = {"delta.enableChangeDataFeed": "true", **KEEP_LOG}


def write_images(
    spark: SparkSession, target: PartTarget, version: int | None, compared: Comparison, values: Mapping[str, str]
) -> None:
    """Insert pictures that are stored now and not there yet, delete those that no file and no kept picture stands for.

    Where nothing is to be deleted, the parts that the workers wrote are committed as they lie there.

    Raises:
        TableChanged: Another program wrote to the table, which was at `version`.
    """
    path = target.folder
    parts = choose_parts(spark, compared, target)
    surplus = compared.surplus()
    if version is None or not surplus.num_rows:
        if version is None or parts:
            delta.commit_files(spark, path, parts, version, IMAGES, {**values, **IMAGES_PROPERTIES})
        return
    files = [f"{path}/{name}" for name in parts]
    insert = spark.read.schema(IMAGES).parquet(*files) if files else spark.createDataFrame([], IMAGES)
    gone = spark.createDataFrame(surplus)
    change = insert.withColumn("gone", F.lit(False)).unionByName(
        # A picture that moved to another class folder or split is deleted as what it was and inserted as what it is:
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


def write_files(
    spark: SparkSession, target: PartTarget, version: int | None, compared: Comparison, values: Mapping[str, str]
) -> None:
    """Bring the ledger in line with the outcomes; a file that is gone is called deleted.

    Where no row of it changes, the new ones are a file that is committed as it lies there.

    Raises:
        TableChanged: Another program wrote to the ledger, which was at `version`.
    """
    path = target.folder
    changes, all_new = compared.ledger_changes(target.ingested_at)
    if version is not None and not changes.num_rows:
        return
    if version is not None and not all_new:
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
