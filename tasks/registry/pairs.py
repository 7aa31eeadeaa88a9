"""The predictions of the test images by challenger and champion, joined image by image."""

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession

from tasks.predict.predictions import JUDGED_ARROW, predicted_by
from tasks.refs import TEST, ModelRef, TableRef
from tasks.registry.comparison import PredictedPair
from tasks.registry.judged import NUM_SAMPLED
from tasks.schema import IMAGE_KEYS_ARROW
from tasks.spark.scratch import scratch_root
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.parquet_rows import ParquetRows
from tasks.tables.relations import Relations

SPLIT_ARROW = pa.schema([IMAGE_KEYS_ARROW.field(name) for name in ("sha256", "split")])

COUNTED = """
CREATE TABLE counted AS
WITH labelled AS (
    SELECT sha256, nfc_normalize(min(label)) AS label, min(content_sha256) AS content_sha256
    FROM tested GROUP BY sha256
)
SELECT sha256, label, content_sha256,
    sha256 IN (FROM (FROM challenger_saw SEMI JOIN tested USING (sha256)) SELECT sha256 WHERE split <> $test)
        AS by_challenger,
    sha256 IN (FROM (FROM champion_saw SEMI JOIN tested USING (sha256)) SELECT sha256 WHERE split <> $test)
        AS by_champion
FROM labelled
"""
"""The test images, and which model was trained or tuned on them; of other images no hash table is made."""

JUDGED = """
CREATE TABLE {name}_judged AS
FROM (FROM {name} UNION ALL BY NAME FROM {name}_again) SEMI JOIN counted USING (sha256)
"""
"""The predictions of the test images by one model."""

PAIRS = """
SELECT counted.label, nfc_normalize(coalesce(challenger.top_labels[1], challenger.label)) AS ours,
    nfc_normalize(coalesce(champion.top_labels[1], champion.label)) AS theirs, count(*)
FROM counted
JOIN challenger_judged AS challenger USING (sha256, content_sha256)
JOIN champion_judged AS champion USING (sha256, content_sha256)
WHERE NOT by_challenger AND NOT by_champion
GROUP BY ALL ORDER BY ALL
"""
"""Numbers of test images by label and by the most probable class, which the column `label` may hide.

Both models have predicted the same bytes of each image, those of the table. Names of classes are compared in the
composed form of Unicode: models of older releases have that of their source.
"""

NUM_TESTED = "SELECT count(*), count(*) FILTER (NOT by_challenger) FROM counted"

SAMPLE = f"SELECT substr(sha256(sha256), 1, 8) AS key FROM counted ORDER BY key LIMIT {NUM_SAMPLED}"  # noqa: S608  # a constant
"""The smallest hashes of the test images; hashed, since sha256 may be a text of any form in a foreign table."""


@dataclass(frozen=True)
class Competitor:
    """A model version in a comparison.

    Attributes:
        model: The version.
        trained_on: The table version on which it was trained; None: no images to leave out.
        again: Its predictions that count although `predictions` has others, as of `predict_held_out`.
    """

    model: ModelRef
    trained_on: TableRef | None
    again: pa.Table | ParquetRows


@dataclass(frozen=True)
class Paired:
    """Pairs of predictions of the same images.

    Attributes:
        pairs: Numbers of images that neither model was trained or tuned on, by label and predictions.
        num_tested: Number of all test images.
        num_new: Number of test images that the challenger was not trained or tuned on.
        sample: Sample of the test images, as in `Judged`.
    """

    pairs: list[PredictedPair]
    num_tested: int
    num_new: int
    sample: tuple[str, ...]

    @property
    def left_out(self) -> int:
        """Number of test images that do not count."""
        return self.num_tested - sum(pair.count for pair in self.pairs)


def paired_predictions(
    spark: SparkSession | None, challenger: Competitor, champion: Competitor, tested: ParquetRows, storage: Storage
) -> Paired:
    """Return the pairs of predictions of a table's test images in `predictions`.

    Args:
        spark: The session, or None.
        challenger: The challenger; the version that it was trained on can be read.
        champion: The champion; likewise.
        tested: The test images, as `held_out_images`.
        storage: Location of the table `predictions`.

    Raises:
        NeedsSpark: Only Spark can read one of the tables.
        WrongInput: The table `predictions` has other columns.
    """
    competitors = {"challenger": challenger, "champion": champion}
    with Relations(storage) as relations:
        relations.add("tested", tested)
        for name, one in competitors.items():
            path = storage.table("predictions")
            relations.add(name, predicted_by(spark, one.model, path, JUDGED_ARROW, storage))
            relations.add(f"{name}_again", one.again)
            relations.add(f"{name}_saw", _splits(spark, one.trained_on, storage))
        relations.run(COUNTED, {"test": TEST})
        for name in competitors:
            relations.run(JUDGED.format(name=name))
        pairs = [PredictedPair(*row) for row in relations.rows(PAIRS)]
        ((num_tested, num_new),) = relations.rows(NUM_TESTED)
        sample = tuple(key for (key,) in relations.rows(SAMPLE))
    return Paired(pairs, int(num_tested), int(num_new), sample)


def _splits(spark: SparkSession | None, table: TableRef | None, storage: Storage) -> pa.Table | ParquetRows:
    """Return the splits of all images of a table version."""
    if table is None:
        return SPLIT_ARROW.empty_table()
    return snapshots.version_rows(spark, table, SPLIT_ARROW, scratch_root(storage))
