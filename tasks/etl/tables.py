"""Bring the tables `images` and `files` in line with the outcomes: at most one commit each."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tasks.etl import delta
from tasks.etl.outcomes import PICTURE
from tasks.etl.parts import PartTarget
from tasks.etl.staging import choose_parts
from tasks.schema import DELETED, FILES, IMAGES, STORED

IMAGES_PROPERTIES = {
    "delta.enableChangeDataFeed": "true",
    # A model's version of the data stays readable as long as the model is there, not the 30 days of Delta's default;
    # maintenance keeps its files, this keeps the log that names them.
    "delta.logRetentionDuration": "interval 36500 days",
}


def write_images(
    spark: SparkSession,
    target: PartTarget,
    version: int | None,
    read: DataFrame,
    outcomes: DataFrame,
    held: DataFrame,
    kept: DataFrame,
    values: dict[str, str],
) -> None:
    """Insert pictures that are stored now and not there yet, delete those that no file and no `kept` stands for.

    Where nothing is to be deleted, the parts that the workers wrote are committed as they lie there.

    Raises:
        TableChanged: Another program wrote to the table, which was at `version`.
    """
    path = target.folder
    stored = outcomes.where(F.col("outcome") == STORED).select(*PICTURE)
    parts = choose_parts(read, stored.join(held, on=PICTURE, how="left_anti"), target)
    gone = held.join(stored.unionByName(kept), on=PICTURE, how="left_anti").select("sha256")
    if version is None or gone.isEmpty():
        if version is None or parts:
            delta.commit_files(spark, path, parts, version, IMAGES, values | IMAGES_PROPERTIES)
        return
    files = [f"{path}/{name}" for name in parts]
    insert = spark.read.schema(IMAGES).parquet(*files) if files else spark.createDataFrame([], IMAGES)
    change = insert.withColumn("gone", F.lit(False)).unionByName(
        # A picture that moved to another class folder or split is deleted as what it was and inserted as what it is:
        # one row of the merge must do both, so the insert updates.
        gone.join(insert, on="sha256", how="left_anti").withColumn("gone", F.lit(True)),
        allowMissingColumns=True,
    )
    values_of_s = {field.name: f"s.{field.name}" for field in IMAGES}
    (
        delta.merge(spark, path, change, ("sha256",))
        .whenMatchedDelete("s.gone")
        .whenMatchedUpdate("NOT s.gone", values_of_s)
        .whenNotMatchedInsert("NOT s.gone", values_of_s)
        .execute()
    )


def write_files(
    spark: SparkSession, path: str, ledger: DataFrame | None, outcomes: DataFrame, values: dict[str, str]
) -> None:
    """Bring the ledger in line with the outcomes; a file that is gone is called deleted."""
    seen = delta.with_schema(outcomes.withColumn("seen_at", F.current_timestamp()), FILES)
    if ledger is None:
        delta.create_table(path, seen, values)
        return
    compared = [name for name in FILES.names if name != "seen_at"]
    changed = seen.join(
        ledger.select(*(F.col(name).alias(f"old_{name}") for name in compared)),
        on=[F.col(name).eqNullSafe(F.col(f"old_{name}")) for name in compared],
        how="left_anti",
    )
    gone = (
        ledger.where(F.col("outcome") != DELETED)
        .join(seen, on="path", how="left_anti")
        .withColumns(
            {"outcome": F.lit(DELETED), "reason": F.lit(None), "detail": F.lit(None), "seen_at": F.current_timestamp()}
        )
    )
    change = changed.unionByName(delta.with_schema(gone, FILES)).persist()
    if not change.isEmpty():
        delta.merge(spark, path, change, ("path",)).whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
    change.unpersist()
