"""Refuse before any work what would fail after hours of it."""

import logging
import shutil
from itertools import islice

import pyarrow as pa
import torch

from tasks import tracking
from tasks.config import CacheConfig, PipelineConfig, TrainConfig, TuneRun
from tasks.config.tune import MOST_CORNERS, corners, with_values
from tasks.disk import check_writable
from tasks.environment import cxx_compiler
from tasks.errors import WrongInput
from tasks.etl.delta import check_table_path
from tasks.etl.listing import check_splits
from tasks.etl.snapshots import read_columns
from tasks.etl.source import prepare_source
from tasks.jvm import check_java
from tasks.preflight.room import check_room
from tasks.refs import TableRef
from tasks.schema import IMAGES_ARROW, TRAIN
from tasks.spark import NeedsSpark
from tasks.storage import Storage
from tasks.train.batches import check_batches
from tasks.train.device import choose_device
from tasks.train.features import ends_in_head, sample_images
from tasks.train.model import build_classifier
from tasks.train.precision import choose_precision
from tasks.tune.space import fit_batches

logger = logging.getLogger("lakevision.preflight")

SPLIT_ARROW = pa.schema([IMAGES_ARROW.field("split")])


def check_training(train: TrainConfig, cache: CacheConfig, *, here: bool = True) -> None:
    """Refuse a model, weights, layers, device, precision, size or compiler that cannot be, before a cache is built.

    Args:
        train: What is to be trained.
        cache: Its pictures.
        here: Whether on this machine; else nothing is said of device, precision and compiler.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    device = choose_device(train.device, 0) if here else None
    if device is not None:
        choose_precision(train.precision, device)
    classifier = build_classifier(train.model, train.weights, 2, train.freeze_backbone)
    for stage in train.fine_tune:
        classifier.unfreeze_from(stage.unfreeze_from)
    side = cache.image_size
    sample = sample_images(side)
    try:
        with torch.no_grad():
            classifier.train()(sample)
    except Exception as error:  # Each architecture fails in its own way on a size it was not made for.
        raise WrongInput(
            f"cache.image_size is {side}, which train.model '{train.model}' does not take ({error}): "
            "give the size the model was made for, 224 for most"
        ) from error
    on_cpu = device is not None and device.type == "cpu"
    if on_cpu and train.compile and not (train.is_head_alone and ends_in_head(classifier, sample)):
        _check_compiler()


def _check_compiler() -> None:
    compiler = cxx_compiler()
    if shutil.which(compiler) is None:
        raise WrongInput(
            f"train.compile is true, which needs a C++ compiler on a CPU, and '{compiler}' is not there: install g++, "
            "name another one in $CXX, or set train.compile to false"
        )


def check_split_size(train: TrainConfig, num_ranks: int, images: TableRef) -> None:
    """Refuse more ranks or a larger batch than a table version has pictures, before a cache is built from it.

    Of a table that only Spark can read nothing is said here: its cache is looked at before the ranks start.

    Args:
        train: Its batch size.
        num_ranks: Ranks that share the split `train`.
        images: Version of the table `images`.

    Raises:
        WrongInput: As `check_batches`.
    """
    if rows := _train_rows(images):
        check_batches(train, num_ranks, rows)


def _train_rows(images: TableRef) -> int:
    """Return the pictures of the split `train`, or 0 where nothing can be said of them here.

    The split is empty, which the cache refuses; Spark is needed; the version's files are gone, of which there may be a
    cache; or another program wrote them in a form that Spark alone reads.
    """
    try:
        return int(read_columns(None, images, SPLIT_ARROW, {"split": TRAIN}).num_rows)
    except (NeedsSpark, FileNotFoundError, pa.ArrowInvalid):
        return 0


def check_search(config: TuneRun, *, here: bool = True) -> None:
    """Refuse a search whose trials could not all be trained, before a cache is built for it.

    Args:
        config: The search.
        here: Whether its trials run on this machine, as `check_training` has it.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    drawn = [with_values(config.train, values) for values in islice(corners(config.tune.space), MOST_CORNERS)]
    for device, precision in {(one.device, one.precision) for one in drawn if here}:
        choose_precision(precision, choose_device(device, 0))
    # Networks are built once each, whatever else of them is searched.
    for train in {(one.model, one.weights, one.freeze_backbone): one for one in drawn}.values():
        check_training(train, config.cache, here=here)


def check_search_sizes(config: TuneRun, images: TableRef) -> None:
    """Refuse a search of which a trial may draw a batch larger than a table version has pictures.

    Raises:
        WrongInput: As `fit_batches`.
    """
    if rows := _train_rows(images):
        fit_batches(config.train, config.tune, rows)


def check_pipeline(config: PipelineConfig, storage: Storage) -> None:
    """Check everything that the DAG needs and that can be known before it starts.

    Raises:
        WrongInput: The first thing that cannot be, with its value and the way out.
    """
    check_java()
    for name in ("home", "tables", "cache"):
        check_writable(getattr(storage, name), f"storage.{name}")
    source = prepare_source(config.etl, storage, config.spark)
    check_splits(source.listing, config.etl)
    num_files = source.listing.num_rows
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
