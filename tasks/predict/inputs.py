"""The table `inputs`: the files that were predicted without a table of images, and the sha256 of their predictions."""

import logging
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, StructField, StructType

from tasks.errors import WrongInput
from tasks.schema import ADDED_TO_FILES, INPUTS, INPUTS_KEY
from tasks.tables import delta, snapshots
from tasks.tables.writer import commit, write_access

logger = logging.getLogger("lakevision.predict")

CHANGES = StructType([*INPUTS, StructField("is_gone", BooleanType(), nullable=False)])
"""Columns of the rows to merge; of a file that is gone, only the key counts."""


def inputs_table(predictions: str) -> str:
    """Return the path or URL of the table `inputs`, which is beside the table of predictions."""
    return f"{predictions.rstrip('/').rpartition('/')[0]}/inputs"


def check_inputs(columns: StructType, path: str) -> None:
    """Check that an existing table has the columns of INPUTS, or of an earlier release, before files are read.

    Raises:
        WrongInput: It has other columns; the message names them.
    """
    expected = [field for field in INPUTS if field.name in columns.names or field.name not in ADDED_TO_FILES]
    wanted, found = ({(field.name, field.dataType.simpleString()) for field in of} for of in (expected, columns))
    if differing := sorted(f"{name} ({kind})" for name, kind in wanted ^ found):
        raise WrongInput(
            f"'{path}' is a table that differs from the table of input files in {', '.join(differing)}",
            setting="predict.predictions",
            way_out="move it away, or give another predict.predictions, beside which the table is written",
        )


def record_inputs(rows: DataFrame, inputs: str, gone: DataFrame | None = None) -> int:
    """Merge the rows of files into the table `inputs`, in one commit; return the number of rows that changed.

    Nothing is committed if no row changes, so that a call may be repeated. Predictions are committed first: a file with
    a row counts as predicted. Of several rows of a file, that of the latest change counts.

    Args:
        rows: Columns source, path, size, modified_at and sha256; changed_at and inode of local files, and error if
            files could not be read.
        inputs: Path or URL of the table, which is created if it is missing.
        gone: Columns source and path of other files, whose rows are removed.

    Raises:
        WrongInput: The table has other columns.
        TableChanged: Another program wrote to the table; the call may be repeated.
    """
    spark = rows.sparkSession
    with write_access(inputs, spark):
        newest = snapshots.newest_snapshot(spark, inputs)
        if newest is not None:
            check_inputs(newest.schema, inputs)
        known = delta.no_rows(spark, INPUTS) if newest is None else snapshots.read_version(spark, newest.table)
        lacking = [column for column in INPUTS if column.name not in known.columns]
        known = delta.with_nulls(known, lacking)
        # A merge reads its source twice.
        changes = _changes(rows, gone, known).persist()
        try:
            num = changes.count()
            if num and newest is None:
                delta.create_table(inputs, delta.with_schema(changes, INPUTS), {})
            elif num:
                if lacking:
                    delta.add_columns(spark, inputs, lacking)
                _merge(spark, changes, inputs)
        finally:
            changes.unpersist()
    logger.info("%s: %d files recorded%s", inputs, num, "" if num else "; nothing new, nothing committed")
    return num


def _changes(rows: DataFrame, gone: DataFrame | None, known: DataFrame) -> DataFrame:
    """Return the rows of CHANGES that differ from those of the table."""
    rows = delta.with_nulls(rows, [column for column in INPUTS if column.name not in rows.columns])
    columns = [name for name in INPUTS.names if name not in {*INPUTS_KEY, "seen_at"}]
    latest = rows.groupBy(*INPUTS_KEY).agg(F.max_by(F.struct(*columns), "modified_at").alias("file"))
    found = latest.select(*INPUTS_KEY, "file.*").withColumn("seen_at", F.lit(datetime.now(UTC)))
    # Not error: the message of a store may have the number of the request in it.
    same = [found[name].eqNullSafe(known[name]) for name in (*INPUTS_KEY, *columns) if name != "error"]
    changed = found.join(known, on=same, how="left_anti").withColumn("is_gone", F.lit(False))  # Spark's literal
    changed = delta.with_schema(changed, CHANGES)
    if gone is None:
        return changed
    removed = known.join(gone.select(*INPUTS_KEY), on=list(INPUTS_KEY), how="left_semi")
    return changed.unionByName(delta.with_schema(removed.withColumn("is_gone", F.lit(True)), CHANGES))


def _merge(spark: SparkSession, changes: DataFrame, inputs: str) -> None:
    values = {name: f"s.{name}" for name in INPUTS.names}
    merge = delta.merge(spark, inputs, changes, INPUTS_KEY).whenMatchedDelete("s.is_gone")
    merge = merge.whenMatchedUpdate(set=values).whenNotMatchedInsert("NOT s.is_gone", values=values)
    commit(inputs, merge.execute)
