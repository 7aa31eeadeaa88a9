"""The champion's answer for each file, in one call: its prediction, or the reason why it has none."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from string import Template
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.etl.source import find_source
from tasks.predict.champion import model_of_images, model_of_table, named_model
from tasks.predict.inputs import check_inputs, inputs_table
from tasks.predict.predictions import predicted_by
from tasks.predict.source import SETTING
from tasks.refs import ModelRef, TableRef
from tasks.schema import (
    DELETED,
    DUPLICATE,
    FILES_ARROW,
    IGNORED,
    IMAGE_KEYS_ARROW,
    INPUTS_ARROW,
    PREDICTIONS_ARROW,
    STORED,
    columns_of,
)
from tasks.spark.scratch import scratch_root
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.chosen import chosen_tables
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

ANSWERS_ARROW = pa.schema(
    [
        ("path", pa.string()),
        ("predicted", pa.string()),
        ("probability", pa.float64()),
        ("unknown_score", pa.float64()),
        ("error", pa.string()),
        ("label", pa.string()),
        ("split", pa.string()),
        ("sha256", pa.string()),
        ("model_version", pa.int64()),
        ("predicted_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns of the answers: label is that of the source, predicted that of the champion (null: an error, or not yet).

path is null for an image of a table that no file of the ledger has, and sha256 for a file that cannot be used.
"""

FILE_ANSWERS_ARROW = pa.schema([field for field in ANSWERS_ARROW if field.name not in {"label", "split"}])
"""Columns of the answers for files in no table of images, which have neither label nor split."""

PREDICTED_ARROW = columns_of(
    PREDICTIONS_ARROW, "sha256", "model_version", "label", "probability", "unknown_score", "error", "predicted_at"
)
LEDGER_ARROW = columns_of(FILES_ARROW, "path", "label", "split", "sha256", "outcome", "reason", "detail")
NAMED_ARROW = columns_of(INPUTS_ARROW, "source", "path", "sha256", "error")

KEYS = "hash(sha256) AS one, hash(sha256 || '~') AS two"
"""Two 64-bit hashes of sha256: ten million of the texts would not fit into memory."""

FILES_OF_TABLE = f"""
CREATE VIEW images AS SELECT sha256, $label AS label, $split AS split FROM found;
CREATE VIEW usable AS
SELECT path, sha256, {KEYS} FROM ledger WHERE outcome IN ('{STORED}', '{DUPLICATE}') AND sha256 IS NOT NULL;
CREATE VIEW keyed AS SELECT *, {KEYS} FROM images;
CREATE VIEW files AS
SELECT path, usable.sha256, label, split, NULL AS error
FROM usable JOIN (SELECT one, two, label, split FROM keyed) USING (one, two)
UNION ALL
SELECT NULL, sha256, label, split, NULL FROM keyed ANTI JOIN usable USING (one, two)
UNION ALL
SELECT path, NULL, label, split, concat_ws(': ', reason, detail) FROM ledger
WHERE outcome NOT IN ('{STORED}', '{DUPLICATE}', '{IGNORED}', '{DELETED}')
"""  # noqa: S608  # constants
"""Files with an image in the table, images without a file, and files that cannot be used."""

FILES_OF_SOURCE = "CREATE VIEW files AS SELECT path, sha256, NULL AS label, NULL AS split, error FROM inputs"

ANSWERS = f"""
CREATE VIEW answers AS
SELECT path, p.label AS predicted, probability, unknown_score, coalesce(f.error, p.error) AS error, f.label, f.split,
    f.sha256, model_version, predicted_at
FROM (SELECT *, {KEYS} FROM files) f LEFT JOIN (SELECT *, {KEYS} FROM predicted) p
    ON f.one = p.one AND f.two = p.two AND f.sha256 IS NOT NULL
"""  # noqa: S608  # constants


class AnswerRows(NamedTuple):
    """The rows of tables from which the answers are computed, which stay on the disk.

    Attributes:
        files: Statements that create the view `files` from the rows.
        rows: The rows, by name.
        schema: Columns of the answers.
        model: The version whose answers they are.
    """

    files: str
    rows: Mapping[str, pa.Table | ParquetRows]
    schema: pa.Schema
    model: ModelRef

    @contextmanager
    def opened(self, storage: Storage) -> Iterator[Relations]:
        """Yield a database with the view `answers`."""
        with Relations(storage) as relations:
            for name, rows in self.rows.items():
                relations.add(name, rows)
            relations.run(f"{self.files}; {ANSWERS}")
            yield relations

    def batches(self, storage: Storage) -> Iterator[pa.RecordBatch]:
        """Yield the answers (`schema`) in batches, ordered by path."""
        columns = ", ".join(self.schema.names)
        with self.opened(storage) as relations:
            yield from relations.batches(f"SELECT {columns} FROM answers ORDER BY path, sha256", self.schema)  # noqa: S608  # constants


def table_answers(
    spark: SparkSession | None, images: TableRef, model: ModelRef, predictions: str, storage: Storage
) -> AnswerRows:
    """Return the rows for the answers of a model version on a table of images.

    Images are named by their files if the table is the ledger's.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
        WrongInput: The table of predictions has other columns.
    """
    scratch = scratch_root(storage)
    ledger: pa.Table | ParquetRows = LEDGER_ARROW.empty_table()
    files = snapshots.newest_snapshot(spark, storage.table("files")) if images.path == storage.table("images") else None
    if files is not None:
        ledger = snapshots.version_rows(spark, files.table, LEDGER_ARROW, scratch)
    # Another program's table may have neither, or a number as label.
    texts = {field.name for field in snapshots.schema_of(spark, images) if field.dataType == StringType()}
    keys = pa.schema([field for field in IMAGE_KEYS_ARROW if field.name in texts])
    rows = {
        "found": snapshots.version_rows(spark, images, keys, scratch),
        "predicted": predicted_by(spark, model, predictions, PREDICTED_ARROW, storage),
        "ledger": ledger,
    }
    columns = {name: name if name in texts else "NULL::VARCHAR" for name in ("label", "split")}
    return AnswerRows(Template(FILES_OF_TABLE).substitute(columns), rows, ANSWERS_ARROW, model)


def source_answers(
    spark: SparkSession | None, source: str, model: ModelRef, predictions: str, storage: Storage
) -> AnswerRows:
    """Return the rows for the answers of a model version on the files of a source that a run has found.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the tables.
        WrongInput: A table has other columns.
    """
    path = inputs_table(predictions)
    files: pa.Table | ParquetRows = NAMED_ARROW.empty_table()
    if (newest := snapshots.newest_snapshot(spark, path)) is not None:
        check_inputs(newest.schema, path)
        files = snapshots.version_rows(spark, newest.table, NAMED_ARROW, scratch_root(storage), {"source": source})
    rows = {"inputs": files, "predicted": predicted_by(spark, model, predictions, PREDICTED_ARROW, storage)}
    return AnswerRows(FILES_OF_SOURCE, rows, FILE_ANSWERS_ARROW, model)


def champion_answers(
    home: str = "",
    *,
    tables: str = "",
    source: str = "",
    model_name: str | None = None,
    alias: str = "champion",
    predictions: str = "",
) -> pa.RecordBatchReader:
    """Return the champion's answer for each file of the table `images`, or of a source, ordered by path.

    Files with the same content have the same answer. `read_pandas()` of the result returns all rows, and iteration over
    it returns batches that need little memory. Spark is started only for tables that only Spark can read.

    Args:
        home: Home folder of the runs; empty: $LAKEVISION_HOME or `.lakevision`.
        tables: Folder, URL or name of the tables, as `storage.tables`; empty: those of the newest run in the home.
        source: Folder or URL that a run of inference has predicted; empty: the table `images`.
        model_name: Name of the registered model; None: the model of the table `images`.
        alias: Alias of the model version.
        predictions: Path or URL of the table of predictions, as `predict.predictions`.

    Returns:
        Rows of ANSWERS_ARROW, or of FILE_ANSWERS_ARROW for a source.

    Raises:
        WrongInput: A table or the model does not exist, or a table has other columns.
    """
    storage = chosen_tables(StorageConfig(home=home or None, tables=tables or None))
    predict = PredictConfig(source=source or None, alias=alias, predictions=predictions or None)
    written = predict.predictions or storage.table("predictions")

    def find(spark: SparkSession | None) -> AnswerRows:
        model = named_model(predict, PromoteConfig(model_name=model_name), storage)
        if predict.source:
            location = str(find_source(predict.source, storage, SETTING))
            model = model or model_of_images(predict, storage, spark)
            return source_answers(spark, location, model, written, storage)
        images = snapshots.latest(spark, storage.table("images"))
        model = model or model_of_table(images, predict, storage)
        return table_answers(spark, images, model, written, storage)

    found = try_without_spark(find, SparkConfig(), storage)
    return pa.RecordBatchReader.from_batches(found.schema, found.batches(storage))
