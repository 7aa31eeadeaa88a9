"""The predictions of the test images by challenger and champion, joined image by image."""

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from tasks.predict.predictions import check_predictions
from tasks.refs import ModelRef, TableRef
from tasks.registry.comparison import PredictedPair
from tasks.schema import IMAGE_KEYS_ARROW, PREDICTIONS, TEST
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

TESTED_ARROW = pa.schema([IMAGE_KEYS_ARROW.field(name) for name in ("sha256", "label")])
SPLIT_ARROW = pa.schema([IMAGE_KEYS_ARROW.field(name) for name in ("sha256", "split")])
LABELS_ARROW = pa.schema([to_arrow_schema(PREDICTIONS).field(name) for name in ("sha256", "label", "top_labels")])

COUNTED = """
CREATE TABLE counted AS
WITH labelled AS (SELECT sha256, nfc_normalize(min(label)) AS label FROM tested GROUP BY sha256)
SELECT sha256, label,
    sha256 IN (FROM (FROM challenger_saw SEMI JOIN tested USING (sha256)) SELECT sha256 WHERE split <> $test)
        AS by_challenger,
    sha256 IN (FROM (FROM champion_saw SEMI JOIN tested USING (sha256)) SELECT sha256 WHERE split <> $test)
        AS by_champion
FROM labelled
"""
"""The test images, and which model was trained or tuned on them; of other images no hash table is made."""

PAIRS = """
SELECT counted.label, nfc_normalize(coalesce(challenger.top_labels[1], challenger.label)) AS ours,
    nfc_normalize(coalesce(champion.top_labels[1], champion.label)) AS theirs, count(*)
FROM counted JOIN challenger USING (sha256) JOIN champion USING (sha256)
WHERE NOT by_challenger AND NOT by_champion
GROUP BY ALL ORDER BY ALL
"""
"""Numbers of test images by label and by the most probable class, which `unsure` in the column `label` may hide.

Names of classes are compared in the composed form of Unicode: models of older releases have that of their source."""

NUM_TESTED = "SELECT count(*), count(*) FILTER (NOT by_challenger) FROM counted"


@dataclass(frozen=True)
class Competitor:
    """A model version in a comparison, and the table version on which it was trained (None: none to leave out)."""

    model: ModelRef
    trained_on: TableRef | None


@dataclass(frozen=True)
class Paired:
    """Pairs of predictions of the same images.

    Attributes:
        pairs: Numbers of images that neither model was trained or tuned on, by label and predictions.
        num_tested: Number of all test images.
        num_new: Number of test images that the challenger was not trained or tuned on.
    """

    pairs: list[PredictedPair]
    num_tested: int
    num_new: int

    @property
    def left_out(self) -> int:
        """Number of test images that do not count."""
        return self.num_tested - sum(pair.count for pair in self.pairs)


def paired_predictions(
    spark: SparkSession | None, challenger: Competitor, champion: Competitor, table: TableRef, storage: Storage
) -> Paired:
    """Return the pairs of predictions of a table's test images in `predictions`.

    Args:
        spark: The session, or None.
        challenger: The challenger; the version that it was trained on can be read.
        champion: The champion; likewise.
        table: The table version with the test images.
        storage: Location of the table `predictions`.

    Raises:
        NeedsSpark: Only Spark can read one of the tables.
        WrongInput: The table `predictions` has other columns.
    """
    scratch, path = scratch_root(storage), storage.table("predictions")
    newest = snapshots.newest_snapshot(spark, path)
    if newest is not None:
        check_predictions(newest.schema, path)
    with Relations(storage) as relations:
        relations.add("tested", snapshots.version_rows(spark, table, TESTED_ARROW, scratch, {"split": TEST}))
        for name, one in (("challenger", challenger), ("champion", champion)):
            rows: pa.Table | ParquetRows = LABELS_ARROW.empty_table()
            if newest is not None:
                by: dict[str, str | int] = {"model_name": one.model.name, "model_version": one.model.version}
                rows = snapshots.version_rows(spark, newest.table, LABELS_ARROW, scratch, by)
            relations.add(name, rows)
            relations.add(f"{name}_saw", _splits(spark, one.trained_on, storage))
        relations.run(COUNTED, {"test": TEST})
        pairs = [PredictedPair(*row) for row in relations.rows(PAIRS)]
        ((num_tested, num_new),) = relations.rows(NUM_TESTED)
    return Paired(pairs, int(num_tested), int(num_new))


def _splits(spark: SparkSession | None, table: TableRef | None, storage: Storage) -> pa.Table | ParquetRows:
    """Return the splits of all images of a table version."""
    if table is None:
        return SPLIT_ARROW.empty_table()
    return snapshots.version_rows(spark, table, SPLIT_ARROW, scratch_root(storage))
