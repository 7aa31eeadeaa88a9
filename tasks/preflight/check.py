"""Refuse before any work what would fail after hours of it."""

import logging
import shutil
from itertools import islice

import torch

from tasks import tracking
from tasks.cache.sizes import cache_bytes, check_disk
from tasks.config import CacheConfig, PipelineConfig, TrainConfig, TuneRun
from tasks.config.tune import MOST_CORNERS, corners, with_values
from tasks.disk import check_writable
from tasks.environment import cxx_compiler
from tasks.errors import WrongInput
from tasks.etl.delta import check_table_path
from tasks.etl.listing import check_splits
from tasks.etl.source import prepare_source
from tasks.jvm import check_java
from tasks.storage import Storage
from tasks.train.device import choose_device
from tasks.train.model import build_classifier
from tasks.train.precision import choose_precision

logger = logging.getLogger("lakevision.preflight")


def check_training(train: TrainConfig, cache: CacheConfig) -> None:
    """Refuse a model, weights, layers, device, precision, size or compiler that cannot be, before a cache is built.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    device = choose_device(train.device, 0)
    choose_precision(train.precision, device)
    if train.compile and device.type == "cpu" and not train.is_head_alone:
        _check_compiler()
    classifier = build_classifier(train.model, train.weights, 2, train.freeze_backbone)
    for stage in train.fine_tune:
        classifier.unfreeze_from(stage.unfreeze_from)
    side = cache.image_size
    try:
        with torch.no_grad():
            classifier.train()(torch.zeros(2, side, side, 3, dtype=torch.uint8))
    except Exception as error:  # Each architecture fails in its own way on a size it was not made for.
        raise WrongInput(
            f"cache.image_size is {side}, which train.model '{train.model}' does not take ({error}): "
            "give the size the model was made for, 224 for most"
        ) from error


def _check_compiler() -> None:
    compiler = cxx_compiler()
    if shutil.which(compiler) is None:
        raise WrongInput(
            f"train.compile is true, which needs a C++ compiler on a CPU, and '{compiler}' is not there: install g++, "
            "name another one in $CXX, or set train.compile to false"
        )


def check_search(config: TuneRun) -> None:
    """Refuse a search whose trials could not all be trained, before a cache is built for it.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    drawn = [with_values(config.train, values) for values in islice(corners(config.tune.space), MOST_CORNERS)]
    # Networks are built once each, whatever else of them is searched.
    for train in {(one.model, one.weights, one.freeze_backbone): one for one in drawn}.values():
        check_training(train, config.cache)


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
    check_disk(storage.cache, cache_bytes(num_files, config.cache))
    tracking.check_tracking(storage)
    logger.info(
        "%d files in %s; Java, tables, model, weights, disk and tracking are in order", num_files, source.location
    )
