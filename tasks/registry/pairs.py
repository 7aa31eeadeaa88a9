"""The predictions of the test images by challenger and champion, joined image by image."""

import os

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from tasks.predict.pending import check_predictions
from tasks.refs import ModelRef, TableRef
from tasks.registry.comparison import PredictedPair
from tasks.schema import IMAGE_KEYS_ARROW, PREDICTIONS, TEST
from tasks.spark.scratch import scratch_root
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

TESTED_ARROW = pa.schema([IMAGE_KEYS_ARROW.field(name) for name in ("sha256", "label")])
SPLIT_ARROW = pa.schema([IMAGE_KEYS_ARROW.field(name) for name in ("sha256", "split")])
LABELS_ARROW = pa.schema([to_arrow_schema(PREDICTIONS).field(name) for name in ("sha256", "label", "top_labels")])

PAIRS = """
WITH labelled AS (SELECT sha256, min(label) AS label FROM tested GROUP BY sha256),
counted AS (FROM labelled ANTI JOIN (SELECT sha256 FROM seen WHERE split <> $test) USING (sha256))
SELECT counted.label, coalesce(challenger.top_labels[1], challenger.label) AS ours,
    coalesce(champion.top_labels[1], champion.label) AS theirs, count(*)
FROM counted JOIN challenger USING (sha256) JOIN champion USING (sha256)
GROUP BY ALL ORDER BY ALL
"""
"""Numbers of test images by label and by the most probable class, which `unsure` in the column `label` may hide."""

NUM_TESTED = "SELECT count(DISTINCT sha256) FROM tested"


def paired_predictions(
    challenger: ModelRef, champion: ModelRef, table: TableRef, seen: TableRef | None, storage: Storage
) -> tuple[list[PredictedPair], int]:
    """Return the pairs of predictions of a table's test images in `predictions`, and the number of images left out.

    Args:
        challenger: The challenger.
        champion: The champion.
        table: The table version with the test images.
        seen: The table version that the champion was trained on, whose images of other splits are left out; None if
            these are the same.
        storage: Location of the table `predictions`.

    Raises:
        NeedsSpark: Only Spark can read one of the tables, or a version no longer exists.
        WrongInput: The table `predictions` has other columns.
    """
    scratch = scratch_root(storage)
    path = storage.table("predictions")
    newest = snapshots.newest_snapshot(None, path)
    if newest is None:
        return [], 0
    check_predictions(newest.schema, path)
    with Relations(storage) as relations:
        relations.add("tested", snapshots.version_rows(None, table, TESTED_ARROW, scratch, {"split": TEST}))
        relations.add("seen", SPLIT_ARROW.empty_table() if seen is None else _existing(seen, storage))
        for name, model in (("challenger", challenger), ("champion", champion)):
            by: dict[str, str | int] = {"model_name": model.name, "model_version": model.version}
            relations.add(name, snapshots.version_rows(None, newest.table, LABELS_ARROW, scratch, by))
        pairs = [PredictedPair(*row) for row in relations.rows(PAIRS, {"test": TEST})]
        ((tested,),) = relations.rows(NUM_TESTED)
    return pairs, int(tested) - sum(pair.count for pair in pairs)


def _existing(table: TableRef, storage: Storage) -> ParquetRows:
    """Return the splits of all images of a table version.

    Raises:
        NeedsSpark: The version no longer exists, or was replaced by that of another table.
    """
    rows = snapshots.version_rows(None, table, SPLIT_ARROW, scratch_root(storage))
    if not all(os.path.exists(file) for file in rows.files):
        raise NeedsSpark
    return rows
