"""The least confident predictions of a model version: errors first, then the lowest probabilities."""

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.refs import ModelRef, PredictedImage, TableRef
from tasks.schema import FILES_ARROW, INPUTS_ARROW, PREDICTIONS_ARROW, PREDICTIONS_KEY, STORED, columns_of
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

NUM_SHOWN = 20

SHA256_ARROW = pa.schema([("sha256", pa.string())])
LEDGER_ARROW = columns_of(FILES_ARROW, "path", "sha256", "outcome")
# A filter needs its columns.
PREDICTED_ARROW = columns_of(PREDICTIONS_ARROW, *PREDICTIONS_KEY, "label", "probability", "error")
NAMED_ARROW = columns_of(INPUTS_ARROW, "source", "path", "sha256", "error")

LEAST_CONFIDENT = """
WITH least AS (
    -- By hash: ten million values of sha256 would not fit into memory.
    FROM predicted SEMI JOIN (SELECT hash(sha256) AS key FROM images) ON hash(predicted.sha256) = key
    ORDER BY error IS NULL, probability, sha256 LIMIT $most
),
-- Only the files of these images are looked up, not those of all.
named AS (SELECT sha256, min(path) AS path FROM ledger SEMI JOIN least USING (sha256) GROUP BY sha256)
SELECT coalesce(path, sha256), label, probability, error FROM least LEFT JOIN named USING (sha256)
ORDER BY error IS NULL, probability, sha256
"""

UNREADABLE = "SELECT path, NULL, NULL, error FROM ledger WHERE sha256 IS NULL ORDER BY path LIMIT $most"


def least_confident(
    spark: SparkSession | None, table: TableRef, predictions: TableRef, model: ModelRef, storage: Storage
) -> tuple[PredictedImage, ...]:
    """Return the NUM_SHOWN least confident predictions of a table's images by this model version.

    An image is named by its file if the table is the ledger's and the ledger has the image, else by its sha256.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
    """
    by_model: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
    scratch = scratch_root(storage)
    ledger: pa.Table | ParquetRows = LEDGER_ARROW.empty_table()
    files = snapshots.newest_snapshot(spark, storage.table("files")) if table.path == storage.table("images") else None
    if files is not None:
        ledger = snapshots.version_rows(spark, files.table, LEDGER_ARROW, scratch, {"outcome": STORED})
    with Relations(storage) as relations:
        relations.add("images", snapshots.version_rows(spark, table, SHA256_ARROW, scratch))
        relations.add("predicted", snapshots.version_rows(spark, predictions, PREDICTED_ARROW, scratch, by_model))
        relations.add("ledger", ledger)
        return _shown(relations, LEAST_CONFIDENT)


def least_confident_files(
    spark: SparkSession | None, source: str, inputs: TableRef, predictions: TableRef, model: ModelRef, storage: Storage
) -> tuple[PredictedImage, ...]:
    """Return the NUM_SHOWN least confident predictions of a source's files, after those that cannot be read.

    Of files with the same content, the first by path is named.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
    """
    by_model: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
    scratch = scratch_root(storage)
    with Relations(storage) as relations:
        relations.add("ledger", snapshots.version_rows(spark, inputs, NAMED_ARROW, scratch, {"source": source}))
        relations.add("predicted", snapshots.version_rows(spark, predictions, PREDICTED_ARROW, scratch, by_model))
        relations.run("CREATE VIEW images AS SELECT sha256 FROM ledger WHERE sha256 IS NOT NULL")
        return (_shown(relations, UNREADABLE) + _shown(relations, LEAST_CONFIDENT))[:NUM_SHOWN]


def _shown(relations: Relations, query: str) -> tuple[PredictedImage, ...]:
    rows = relations.rows(query, {"most": NUM_SHOWN})
    return tuple(
        PredictedImage(path=path, label=label, probability=probability, error=error)
        for path, label, probability, error in rows
    )
