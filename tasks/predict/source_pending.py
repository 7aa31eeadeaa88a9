"""Files of a source that a model version has not predicted, and files that are gone from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.predict.inputs import check_inputs
from tasks.predict.pending import PREDICTED_ARROW
from tasks.predict.predictions import predicted_by
from tasks.predict.source import ListedSource
from tasks.refs import ModelRef
from tasks.schema import FILE_ARROW, INPUTS_ARROW, INPUTS_KEY, TO_PREDICT_ARROW
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

KNOWN_ARROW = pa.schema([INPUTS_ARROW.field(name) for name in ("source", "sha256", *FILE_ARROW.names)])
KEY_ARROW = pa.schema([INPUTS_ARROW.field(name) for name in INPUTS_KEY])

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
) k ON l.one = k.one AND l.two = k.two WHERE k.one IS NULL OR status_of(l.changed_at, l.inode) <> k.status
"""
"""Files that are new, changed or touched, could not be read, or whose image has no prediction."""

TO_PREDICT = """
FROM pending LEFT JOIN (
    SELECT path, sha256 AS known_sha256 FROM known SEMI JOIN (FROM pending WHERE is_touched) USING (path)
) USING (path)
"""

GONE = """
CREATE TABLE gone AS
SELECT source, path, sha256 FROM (SELECT *, hash(path) AS one, hash(path || '~') AS two FROM known)
ANTI JOIN (SELECT hash(path) AS one, hash(path || '~') AS two FROM listing) USING (one, two)
"""

LEAVING = """
SELECT DISTINCT sha256 FROM gone
ANTI JOIN (FROM known SEMI JOIN gone USING (sha256) ANTI JOIN gone USING (path)) USING (sha256)
WHERE sha256 IS NOT NULL
"""
"""Contents of gone files that no other file has, as far as the table knows."""

OF_PART = (
    "CREATE TABLE known AS FROM all_known SEMI JOIN listing USING (path)",
    "CREATE TABLE predictions AS FROM all_predictions SEMI JOIN known USING (sha256)",
)
"""The rows of the listed files alone: the hash tables of the joins are those of a batch, and not of all files."""


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


@dataclass(frozen=True)
class PendingFiles:
    """Files to read, and files whose rows are removed.

    Attributes:
        count: Number of files to read.
        num_gone: Number of files in the table `inputs` that are no longer in the source.
    """

    count: int
    num_gone: int
    _relations: Relations

    def table(self) -> pa.Table:
        """Return the files to read (TO_PREDICT_ARROW) in memory, ordered by path."""
        columns = ", ".join(TO_PREDICT_ARROW.names)
        return self._relations.table(f"SELECT {columns} {TO_PREDICT} ORDER BY path", TO_PREDICT_ARROW)

    def gone(self) -> GoneFiles:
        """Return the files that are gone, in memory."""
        rows = self._relations.table("SELECT source, path FROM gone", KEY_ARROW)
        contents = self._relations.table(LEAVING, pa.schema([INPUTS_ARROW.field("sha256")]))
        num_known = 0
        if contents.num_rows:
            ((num_known,),) = self._relations.rows(
                "SELECT count(DISTINCT hash(sha256)) FROM known WHERE sha256 IS NOT NULL"
            )
        return GoneFiles(rows, contents, num_known)


@contextmanager
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
) -> Iterator[PendingFiles]:
    """Yield the files of a source without a prediction by this model version; listing and tables stay on the disk.

    Args:
        spark: The session, or None.
        source: The source.
        inputs: Path or URL of the table `inputs`, which may not exist.
        predictions: Path or URL of the table of predictions, which may not exist.
        model: The model version.
        storage: Storage with the home, to which queries spill.
        retry_errors: Whether files whose image has an error are pending.
        is_part: Whether the listing has only some files of the source; no other file counts as gone then.

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
        for statement in OF_PART if is_part else ():
            relations.run(statement)
        relations.run(FINGERPRINT)
        relations.run(PENDING, {"retry_errors": retry_errors})
        relations.run(GONE)
        ((count, num_gone),) = relations.rows("SELECT (SELECT count(*) FROM pending), (SELECT count(*) FROM gone)")
        yield PendingFiles(count, num_gone, relations)
