"""Checks before a run of problems that would otherwise make it fail after hours, such as a disk without space."""

import glob
import logging
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa

from tasks.cache.manifest import MANIFEST, read_manifest, whole_cache
from tasks.cache.write import cache_bytes, check_disk
from tasks.config.cache import CacheConfig
from tasks.config.distributed import DistributedConfig
from tasks.config.etl import EtlConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.etl.gates import FileCounts, check_class_sizes, check_enough_images, most_to_train_on
from tasks.etl.groups import groups_by_class
from tasks.etl.ingest import open_tables
from tasks.etl.listing import check_splits, class_sizes
from tasks.etl.outcomes import Comparison
from tasks.etl.source import Source, prepare_source
from tasks.launch.initial_weights import fetch_initial_weights
from tasks.object_store import file_system
from tasks.paths import resolved
from tasks.predict.inputs import inputs_table
from tasks.predict.source import list_source
from tasks.refs import TRAIN, TableRef
from tasks.schema import IMAGES_ARROW
from tasks.spark.jvm import check_java
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.disk import check_writable, existing_folder
from tasks.system.home import check_home
from tasks.system.locks import unlocked_warning
from tasks.tables import delta, snapshots
from tasks.tables.delta import check_table_path
from tasks.tables.relations import Relations
from tasks.tables.snapshots import read_columns
from tasks.tracking.server import check_tracking
from tasks.train.batches import check_batches, check_monitor

logger = logging.getLogger("lakevision.preflight")

SPLIT_ARROW = pa.schema([IMAGES_ARROW.field("split")])


def check_split_size(train: TrainConfig, num_ranks: int, images: TableRef) -> None:
    """Check that a table version has enough images for the ranks, before its cache is built.

    Tables that only Spark can read are not checked here: their cache is checked before the ranks start.

    Args:
        train: Settings of the training run.
        num_ranks: Number of ranks that share the split `train`.
        images: Version of the table `images`.

    Raises:
        WrongInput: As `check_batches`.
    """
    if rows := train_rows(images):
        check_batches(train, num_ranks, rows)


def train_rows(images: TableRef) -> int:
    """Return the number of images of the split `train`, or 0 if it cannot be determined here.

    It is 0 if the split is empty, which is an error when the cache is built, or if only Spark can read the files. It is
    also 0 if the version's files have been removed; a cache of the version may still exist.
    """
    try:
        return int(read_columns(None, images, SPLIT_ARROW, {"split": TRAIN}).num_rows)
    except (NeedsSpark, FileNotFoundError, pa.ArrowInvalid):
        return 0


def check_pipeline(
    config: PipelineConfig, storage: Storage, *, trains_here: bool = True, ranks_here: bool = False
) -> None:
    """Check everything that the DAG needs and that can be checked before it starts.

    Args:
        config: Settings of the DAG.
        storage: Its storage.
        trains_here: Whether it trains on this machine; if not, the ranks check device, precision and compiler.
        ranks_here: Whether ranks train on this machine.

    Raises:
        WrongInput: A check failed; the message has the setting, its value and the way out.
    """
    from tasks.checks.trainable import check_training  # Here: it loads torch.
    from tasks.predict.scoring import check_settings  # Here: it loads pandas.

    check_java()
    check_home(Path(storage.home), storage.home_entries)
    for name in ("home", "tables", "cache"):
        check_writable(getattr(storage, name), f"storage.{name}")
    if storage.artifacts.startswith("s3a://"):
        check_writable(storage.artifacts, "storage.artifacts")
    for location in (storage.tables, storage.cache):
        if warning := unlocked_warning(location):
            logger.warning("%s", warning)
    source = prepare_source(config.etl, storage, config.spark)
    check_splits(source.listing, config.etl)
    sizes = class_sizes(source.listing)
    check_settings(config.predict, sizes)
    tables = [check_table_path(storage.table(name)) for name in ("images", "files")]
    if config.etl.deleted != "keep" or not any(tables):  # else tables may have images that the source has no more
        check_listing(config, source, sizes, storage, has_tables=any(tables))
    check_table_path(config.predict.predictions or storage.table("predictions"))
    if config.predict.table and not check_table_path(config.predict.table, "predict.table"):
        raise WrongInput(
            f"predict.table is '{config.predict.table}', which is not a Delta table",
            setting="predict.table",
            way_out="check the path",
        )
    if config.predict.source:
        inputs = inputs_table(config.predict.predictions or storage.table("predictions"))
        list_source(config.predict.source, inputs, storage, config.spark)
    if config.ranks is None and config.distributed != DistributedConfig():
        logger.warning("train_on is 'single': the settings of 'distributed' are not used; train_on both uses them")
    train = fetch_initial_weights(config.train, storage, config.spark, config.promote.model_name)
    check_training(train, config.cache, here=trains_here, distributed=config.distributed if ranks_here else None)
    check_room(config.etl, config.cache, source, storage)
    check_tracking(storage, data=True)
    logger.info(
        "%d files in %s; Java, tables, model, weights, disk and tracking are in order",
        *(source.listing.num_rows, source.location),
    )


def check_listing(
    config: PipelineConfig, source: Source, sizes: Counter[str], storage: Storage, *, has_tables: bool
) -> None:
    """Check all that the numbers of files say about training, before a file is read.

    The table will have at most as many images of each class, since ETL leaves out duplicates and unusable files.

    Args:
        config: Settings of the DAG.
        source: The source.
        sizes: Number of its files of each class.
        storage: Storage, for temporary files.
        has_tables: Whether tables exist, whose images keep their split.

    Raises:
        WrongInput: There are too few images or groups, in all, of a class, or for the ranks, or too few classes for the
            metric.
    """
    etl = config.etl
    if etl.split_by in {"folder", "file"}:
        most = source.listing.counts("split")[TRAIN]
    else:
        check_enough_images(sizes, str(source.location), etl)
        if etl.split_group.by in {"pattern", "column"} and not has_tables:
            groups = groups_by_class(source.listing, source.groups, etl, storage)
            check_enough_images(groups, str(source.location), etl, "groups")
        most = most_to_train_on(sizes, etl, is_new=not has_tables)
    if not has_tables:  # else ETL compares both, and asks whether the source is complete
        check_class_sizes(FileCounts(images=sizes), etl)
    num_ranks = config.ranks.num_ranks if config.ranks else 1
    check_batches(config.train, num_ranks, most, f"the source has at most {{}} images for the split '{TRAIN}'")
    check_monitor(config.train, len(sizes))


def check_room(etl: EtlConfig, cache_config: CacheConfig, source: Source, storage: Storage) -> None:
    """Check that the disk has space for the run's cache; an existing cache needs none.

    Raises:
        WrongInput: The disk has too little space; the message has the needed and the free space.
    """
    needed = cache_bytes(source.listing.num_rows, cache_config)
    folder = existing_folder(storage.cache)
    # The comparison of the source with large tables takes seconds: done only if the disk is too small.
    if folder is None or needed <= shutil.disk_usage(folder).free:
        return
    try:
        images = _unchanged_images(etl, source, storage)
    except NeedsSpark:
        # The disk is checked again when a cache is built; an error here could stop runs that have their cache.
        logger.info("only Spark can read the tables in %s: the disk is checked when a cache is built", storage.tables)
        return
    if images is None or not _has_cache(images, cache_config, storage):
        check_disk(storage.cache, needed)


def _unchanged_images(etl: EtlConfig, source: Source, storage: Storage) -> TableRef | None:
    """Return the newest version of `images` if no file was added, changed or removed since, else None.

    Files that the ETL reads again in every run, such as those without read permission, count as unchanged.
    """
    tables = open_tables(None, etl, storage, source)
    if None in tables.versions or tables.replaced:
        return None
    with Relations(storage) as relations:
        keep = etl.deleted == "keep"
        Comparison(
            relations,
            source.listing,
            tables.ledger,
            tables.existing,
            replaced=False,
            keep_deleted=keep,
            ignored=source.left.rows(),
        )
        changed = relations.rows("SELECT count(*) FROM changed WHERE status <> 'again'")[0][0]
    return None if changed else snapshots.latest(None, storage.table("images"))


def _has_cache(images: TableRef, cache_config: CacheConfig, storage: Storage) -> bool:
    """Return whether a complete cache of this version exists, or of an earlier version with the same rows."""
    filesystem, root = file_system(storage.cache)
    changed = delta.last_change(images.path)  # Maintenance creates versions, too, without a change of rows.
    for path in filesystem.glob(f"{glob.escape(root)}/[!.]*/{MANIFEST}"):
        url = f"{storage.cache.rstrip('/')}/{path.split('/')[-2]}"
        manifest = read_manifest(url)
        if manifest is None or not _is_same_table(manifest.table, images):
            continue
        if changed <= manifest.table.version and whole_cache(url, cache_config):
            return True
    return False


def _is_same_table(one: TableRef, other: TableRef) -> bool:
    """Return whether both are the same table, by id if both have one: a home may have been moved or mounted."""
    if one.table_id and other.table_id:
        return one.table_id == other.table_id
    return resolved(one.path) == resolved(other.path)
