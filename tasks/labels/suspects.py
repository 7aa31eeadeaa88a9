"""Suspected labels of a table of images: each image with the label that the features of the others speak for."""

import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa
import torch
from pyspark.sql import SparkSession

from tasks.cache.manifest import CacheManifest, open_cache
from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.labels.confident import LabelErrors, find_label_errors, probabilities_of_others
from tasks.predict.thumbnails import contents_in_table, thumbnail
from tasks.refs import SPLITS, TEST, TRAIN, VAL, CacheRef, LabelErrorReport, SuspectedLabel
from tasks.schema import FILES_ARROW, IMAGES_ARROW, SUSPECTS_ARROW, columns_of
from tasks.spark.scratch import scratch_root
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tables.direct_commits import append_rows, needs_spark
from tasks.tables.relations import Relations
from tasks.tables.writer import write_access
from tasks.train.features import materialize_features, read_features
from tasks.train.phases import trains_on_features
from tasks.verdict.judge import as_in_training
from tasks.verdict.probe import Features, Labels

logger = logging.getLogger("lakevision.labels")

MAX_IMAGES = 200_000
"""Images whose labels are looked at: their features, a gigabyte of 1,280 numbers each, are in memory."""

NUM_SHOWN = 24
"""Suspected labels that are shown with a thumbnail."""

KEYS_ARROW = columns_of(IMAGES_ARROW, "split", "sha256", "label")
PATHS_ARROW = columns_of(FILES_ARROW, "sha256", "path")


def suspect_labels(
    train: TrainConfig, cache: CacheRef, storage: Storage, spark_config: SparkConfig
) -> LabelErrorReport:
    """Find suspected labels, and append them to the table `suspects`, the most suspicious first.

    Args:
        train: Settings of a training run, whose cached features are used.
        cache: Cache of the images.
        storage: Storage of features and tables.
        spark_config: Settings of a session, which is started if only Spark can read or write the tables.

    Raises:
        WrongInput: The network has no cached features, there are too many images, or only Spark can write the table.
        CacheDamaged: The cache was changed or removed.
        DiskFull: As `materialize_features`.
    """
    check_suspects(storage)
    manifest = open_cache(cache)
    features_NF, labels_N = features_of_all(train, cache, manifest, storage)
    found = find_label_errors(
        probabilities_of_others(features_NF, labels_N, len(manifest.classes), train.seed), labels_N
    )

    def publish(spark: SparkSession | None) -> LabelErrorReport:
        return _publish(found, manifest, storage, spark)

    return try_without_spark(publish, spark_config, storage)


def features_of_all(
    train: TrainConfig, cache: CacheRef, manifest: CacheManifest, storage: Storage
) -> tuple[Features, Labels]:
    """Return features, float32 (N, F), and labels, int64 (N,), of all images: by split, as in SPLITS, and sha256.

    The features of `train` and `val` are those of a training run with these settings, which are not computed twice.

    Raises:
        WrongInput, CacheDamaged, DiskFull: As `suspect_labels`.
    """
    num_images = sum(part.rows for part in manifest.splits.values())
    if num_images > MAX_IMAGES:
        raise WrongInput(
            f"the table has {num_images} images, and the labels of at most {MAX_IMAGES} are looked at at once",
            way_out="take a sample by etl.sample_fraction, into tables of its own",
        )
    with as_in_training(train, cache, manifest, storage) as (context, _phase, _batch):
        if not trains_on_features(context):
            raise WrongInput(
                f"the head of '{train.model}' is not its last layer, so that it has no cached features",
                setting="train.model",
                way_out="give another model",
            )
        parts = [
            read_features(*materialize_features(context, splits), train.seed, MAX_IMAGES)
            for splits in ((TRAIN, VAL), (TEST,))
        ]
    features, labels = zip(*parts, strict=True)
    return torch.cat(features).numpy(), torch.cat(labels).numpy()


def keys_of_cache(spark: SparkSession | None, manifest: CacheManifest, storage: Storage) -> pa.Table:
    """Return split, sha256 and label of the images of a cache, in the order of `features_of_all`.

    Raises:
        NeedsSpark: `spark` is None, and only Spark can read the table.
    """
    with Relations(storage) as relations:
        relations.add("images", snapshots.version_rows(spark, manifest.table, KEYS_ARROW, scratch_root(storage)))
        relations.add(
            "left_out", pa.table({"sha256": pa.array([one.sha256 for one in manifest.quarantined], "string")})
        )
        # As the cache is sorted.
        order = ", ".join(f"split = '{split}' DESC" for split in SPLITS)
        query = f"SELECT split, sha256, label FROM images ANTI JOIN left_out USING (sha256) ORDER BY {order}, sha256"  # noqa: S608  # constants
        return relations.table(query, KEYS_ARROW)


def paths_of(spark: SparkSession | None, hashes: Sequence[str], storage: Storage) -> dict[str, str]:
    """Return the first path of each image in the ledger, by sha256.

    Raises:
        NeedsSpark: As `keys_of_cache`.
    """
    ledger = snapshots.newest_snapshot(spark, storage.table("files"))
    if ledger is None:
        return {}
    with Relations(storage) as relations:
        relations.add("files", snapshots.version_rows(spark, ledger.table, PATHS_ARROW, scratch_root(storage)))
        relations.add("wanted", pa.table({"sha256": pa.array(hashes, "string")}))
        query = "SELECT sha256, min(path) FROM files SEMI JOIN wanted USING (sha256) GROUP BY sha256"
        return dict(relations.rows(query))


def check_suspects(storage: Storage) -> None:
    """Check that the table of suspected labels can be written.

    Raises:
        WrongInput: Only Spark can write it.
    """
    path = storage.table("suspects")
    if needs_spark(path):
        raise WrongInput(f"the table '{path}' can only be written by Spark", way_out="give tables in a folder or on S3")


def _publish(
    found: LabelErrors, manifest: CacheManifest, storage: Storage, spark: SparkSession | None
) -> LabelErrorReport:
    keys, images = keys_of_cache(spark, manifest, storage), manifest.table
    assert keys.num_rows == sum(part.rows for part in manifest.splits.values()), "the cache has the version's images"
    now = datetime.now(UTC)
    rows = keys.take(pa.array(found.rows_S)).to_pylist()
    suspects = [
        {
            "found_at": now,
            "rank": rank,
            **row,
            "suggested": manifest.classes[suggested],
            "score": score,
            "table_id": images.table_id,
            "table_version": images.version,
        }
        for rank, (row, suggested, score) in enumerate(zip(rows, found.suggested_S, found.scores_S, strict=True), 1)
    ]
    path = storage.table("suspects")
    with write_access(path, spark):
        append_rows(path, pa.Table.from_pylist(suspects, SUSPECTS_ARROW))
    shown = suspects[:NUM_SHOWN]
    contents = contents_in_table(spark, images, storage, shown)
    paths = paths_of(spark, [row["sha256"] for row in shown], storage)
    pairs = Counter((row["label"], row["suggested"]) for row in suspects[: round(found.num_expected)])
    line = (
        f"about {found.num_expected:.0f} of {keys.num_rows} labels are wrong; {len(suspects)} are suspected, the most "
        f"suspicious first, in '{path}'"
    )
    logger.info("%s", line)
    return LabelErrorReport(
        line=line,
        images=keys.num_rows,
        suspected=len(suspects),
        expected=round(found.num_expected, 1),
        suspects=path,
        pairs=tuple((label, suggested, number) for (label, suggested), number in pairs.most_common(10)),
        shown=tuple(
            SuspectedLabel(
                sha256=row["sha256"],
                path=paths.get(row["sha256"], ""),
                label=row["label"],
                suggested=row["suggested"],
                score=row["score"],
                thumbnail=thumbnail(contents.get(row["sha256"])),
            )
            for row in shown
        ),
    )
