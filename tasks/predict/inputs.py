"""The table `inputs`: the files that were predicted without a table of images, and the sha256 of their predictions.

A listing is compared with it: files that a model version has not predicted, and files that are gone.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, StructField, StructType

from tasks.errors import WrongInput
from tasks.predict.pending import PREDICTED_ARROW
from tasks.predict.predictions import predicted_by
from tasks.predict.source import ListedSource
from tasks.refs import ModelRef
from tasks.schema import ADDED_TO_FILES, FILE_ARROW, INPUTS, INPUTS_ARROW, INPUTS_KEY, TO_PREDICT_ARROW, columns_of
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import delta, snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations
from tasks.tables.writer import commit, write_access

logger = logging.getLogger("lakevision.predict")

CHANGES = StructType([*INPUTS, StructField("is_gone", BooleanType(), nullable=False)])
"""Columns of the rows to merge; of a file that is gone, only the key counts."""

KNOWN_ARROW = columns_of(INPUTS_ARROW, "source", "sha256", *FILE_ARROW.names)
KEY_ARROW = columns_of(INPUTS_ARROW, *INPUTS_KEY)

FINGERPRINT = """
CREATE OR REPLACE MACRO fingerprint(a, b, c) AS hash(a, b, epoch_us(c));
CREATE OR REPLACE MACRO status_of(a, b) AS CASE WHEN b IS NOT NULL THEN hash(epoch_us(a), b) END
"""
"""64 bits of path, size and time; two of them, of different texts, stand for the path: texts would fill the memory.

The other 64 bits are of inode and time of status change. They are null without an inode, and null does not differ.
"""

PENDING = """
CREATE TABLE pending AS
SELECT path, size, modified_at, changed_at, inode, k.one IS NOT NULL AS is_touched FROM (
    SELECT *, fingerprint(path, size, modified_at) AS one, fingerprint(path || '~', size, modified_at) AS two
    FROM listing
) l LEFT JOIN (
    SELECT fingerprint(path, size, modified_at) AS one, fingerprint(path || '~', size, modified_at) AS two,
        status_of(changed_at, inode) AS status
    FROM (SELECT *, hash(sha256) AS key, hash(sha256 || '~') AS other FROM known)
    SEMI JOIN (
        SELECT hash(sha256) AS key, hash(sha256 || '~') AS other
        FROM predictions WHERE error IS NULL OR NOT $retry_errors
    ) USING (key, other)
) k ON l.one = k.one AND l.two = k.two WHERE k.one IS NULL OR status_of(l.changed_at, l.inode) <> k.status;

CREATE TABLE gone AS
SELECT source, path, sha256 FROM (SELECT *, hash(path) AS one, hash(path || '~') AS two FROM known)
ANTI JOIN (SELECT hash(path) AS one, hash(path || '~') AS two FROM listing) USING (one, two)
"""
"""Files that are new, changed or touched, could not be read, or whose image has no prediction.

Table `gone`: files that are no longer in the source.
"""

TO_PREDICT = """
FROM pending LEFT JOIN (
    SELECT path, sha256 AS known_sha256 FROM known SEMI JOIN (FROM pending WHERE is_touched) USING (path)
) USING (path)
"""

LEAVING = """
SELECT DISTINCT sha256 FROM gone
ANTI JOIN (FROM known SEMI JOIN gone USING (sha256) ANTI JOIN gone USING (path)) USING (sha256)
WHERE sha256 IS NOT NULL
"""
"""Contents of gone files that no other file has, as far as the table knows."""

OF_PART = """
CREATE TABLE known AS FROM all_known SEMI JOIN listing USING (path);
CREATE TABLE predictions AS FROM all_predictions SEMI JOIN known USING (sha256);
"""
"""The rows of the listed files alone: the hash tables of the joins are those of a batch, and not of all files."""


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


@dataclass(frozen=True)
class GoneFiles:
    """Files whose rows of the table `inputs` are removed.

    Attributes:
        rows: Their source and path (KEY_ARROW).
        contents: sha256 of those of their contents that no other file in the table has.
        num_known: Number of contents of the source in the table; 0 without `contents`, where nobody needs it.
    """

    rows: pa.Table
    contents: pa.Table
    num_known: int


def pending_files(
    spark: SparkSession | None,
    source: ListedSource,
    inputs: str,
    predictions: str,
    model: ModelRef,
    storage: Storage,
    *,
    retry_errors: bool = False,
    is_part: bool = False,
) -> tuple[pa.Table, GoneFiles]:
    """Compare a source with the predictions by a model version; listing and tables stay on the disk.

    Args:
        spark: The session, or None.
        source: The source.
        inputs: Path or URL of the table `inputs`, which may not exist.
        predictions: Path or URL of the table of predictions, which may not exist.
        model: The model version.
        storage: Storage with the home, to which queries spill.
        retry_errors: Whether files whose image has an error are pending.
        is_part: Whether the listing has only some files of the source; no other file counts as gone then.

    Returns:
        The files without a prediction (TO_PREDICT_ARROW), ordered by path, and the files that are gone, in memory.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read one of the tables.
        WrongInput: One of the tables has other columns.
    """
    scratch = scratch_root(storage)
    known: pa.Table | ParquetRows = KNOWN_ARROW.empty_table()
    if (newest := snapshots.newest_snapshot(spark, inputs)) is not None:
        check_inputs(newest.schema, inputs)
        known = snapshots.version_rows(spark, newest.table, KNOWN_ARROW, scratch, {"source": source.name})
    predicted = predicted_by(spark, model, predictions, PREDICTED_ARROW, storage)
    with Relations(storage) as relations:
        relations.add("listing", source.listing)
        prefix = "all_" if is_part else ""
        relations.add(f"{prefix}known", known)
        relations.add(f"{prefix}predictions", predicted)
        relations.run(f"{OF_PART if is_part else ''} {FINGERPRINT}; {PENDING}", {"retry_errors": retry_errors})
        columns = ", ".join(TO_PREDICT_ARROW.names)
        files = relations.table(f"SELECT {columns} {TO_PREDICT} ORDER BY path", TO_PREDICT_ARROW)
        rows = relations.table("SELECT source, path FROM gone", KEY_ARROW)
        contents = relations.table(LEAVING, columns_of(INPUTS_ARROW, "sha256"))
        num_known = 0
        if contents.num_rows:
            ((num_known,),) = relations.rows("SELECT count(DISTINCT hash(sha256)) FROM known WHERE sha256 IS NOT NULL")
    return files, GoneFiles(rows, contents, num_known)


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
                commit(inputs, delta.merge_changes(spark, inputs, changes, INPUTS_KEY, INPUTS.names).execute)
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
