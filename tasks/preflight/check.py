"""Refuse before any work what would fail after hours of it."""

import logging

import pyarrow as pa

from tasks import tracking
from tasks.config.pipeline import PipelineConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.etl.listing import check_splits
from tasks.etl.source import prepare_source
from tasks.preflight.room import check_room
from tasks.refs import TableRef
from tasks.schema import IMAGES_ARROW, TRAIN
from tasks.spark.jvm import check_java
from tasks.spark.session import NeedsSpark
from tasks.storage import Storage
from tasks.system.disk import check_writable
from tasks.tables.delta import check_table_path
from tasks.tables.snapshots import read_columns
from tasks.train.batches import check_batches

logger = logging.getLogger("lakevision.preflight")

SPLIT_ARROW = pa.schema([IMAGES_ARROW.field("split")])


def check_split_size(train: TrainConfig, num_ranks: int, images: TableRef) -> None:
    """Refuse more ranks or a larger batch than a table version has images, before a cache is built from it.

    Of a table that only Spark can read nothing is said here: its cache is looked at before the ranks start.

    Args:
        train: Its batch size.
        num_ranks: Ranks that share the split `train`.
        images: Version of the table `images`.

    Raises:
        WrongInput: As `check_batches`.
    """
    if rows := train_rows(images):
        check_batches(train, num_ranks, rows)


def train_rows(images: TableRef) -> int:
    """Return the images of the split `train`, or 0 where nothing can be said of them here.

    The split is empty, which the cache refuses; Spark is needed; the version's files are gone, of which there may be a
    cache; or another program wrote them in a form that Spark alone reads.
    """
    try:
        return int(read_columns(None, images, SPLIT_ARROW, {"split": TRAIN}).num_rows)
    except (NeedsSpark, FileNotFoundError, pa.ArrowInvalid):
        return 0


def check_pipeline(config: PipelineConfig, storage: Storage) -> None:
    """Check everything that the DAG needs and that can be known before it starts.

    Raises:
        WrongInput: The first thing that cannot be, with its value and the way out.
    """
    from tasks.preflight.trainable import check_training  # Here: it loads torch.

    check_java()
    for name in ("home", "tables", "cache"):
        check_writable(getattr(storage, name), f"storage.{name}")
    source = prepare_source(config.etl, storage, config.spark)
    check_splits(source.listing, config.etl)
    num_files = source.listing.num_rows
    if config.etl.deleted != "keep":  # then the tables hold images that the source has no longer
        check_batches(config.train, config.distributed.num_ranks, num_files, "the source has {} images")
    for path in (storage.table("images"), storage.table("files")):
        check_table_path(path)
    check_table_path(config.predict.predictions or storage.table("predictions"))
    if config.predict.table and not check_table_path(config.predict.table):
        raise WrongInput(f"predict.table is '{config.predict.table}', where no Delta table is: check the path")
    check_training(config.train, config.cache)
    check_room(config.etl, config.cache, source, storage)
    tracking.check_tracking(storage)
    logger.info(
        "%d files in %s; Java, tables, model, weights, disk and tracking are in order", num_files, source.location
    )
