"""Initial weights of a training run from a model that was trained before: its files are fetched once, as data."""

import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.config.storage import SparkConfig
from tasks.config.train import TrainConfig
from tasks.errors import WrongInput
from tasks.model.pretrained import CHAMPION, names_model
from tasks.model_package.description import DESCRIPTION_FILE, WEIGHTS_FILE
from tasks.refs import CacheRef, ModelRef, RunRef
from tasks.spark.session import try_without_spark
from tasks.storage import Storage
from tasks.tables import snapshots
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.models import derived_model_name, fetch_logged, model_with_alias
from tasks.tracking.server import reachable
from tasks.tracking.trained import logged_training

logger = logging.getLogger("lakevision.train")

DAY_SECONDS = 86_400


def fetch_initial_weights(
    train: TrainConfig,
    storage: Storage,
    spark_config: SparkConfig,
    model_name: str | None = None,
    cache: CacheRef | None = None,
) -> TrainConfig:
    """Return settings whose weights are a file in the home, if they name the champion or an MLflow run.

    Where the champion started from another model on the same cache, training starts from that one again: with unchanged
    data its finished run is found.

    Args:
        train: Settings of the training run.
        storage: Locations of the home, the tables and the tracking server.
        spark_config: Spark session, for tables that only Spark can read.
        model_name: Registered model; None: that of the table `images`.
        cache: Cache of the training run, if it is built.

    Raises:
        WrongInput: There is no such champion or finished run, or its files are not those of a model.
        TrackingUnavailable: The tracking server does not answer.
    """
    if not names_model(train.weights):
        return train
    if train.weights != CHAMPION:
        return _with_file(train, RunRef(run_id=train.weights), storage)
    model = _champion(storage, spark_config, model_name)
    before = None if cache is None else _run_before(model, cache, storage)
    if before is not None:
        logger.info(
            "the champion was trained on this cache: training starts from MLflow run %s, as it did", before.run_id
        )
    return _with_file(train, before or model, storage)


def _run_before(champion: ModelRef, cache: CacheRef, storage: Storage) -> RunRef | None:
    """Return the MLflow run whose model the champion started from, if it was trained on this cache, else None."""
    try:
        with reachable(storage):
            config = logged_training(storage, champion.run_id).config
    except WrongInput:  # Its run was deleted, and the registered model was kept.
        return None
    weights = Path(config["train"]["weights"])
    is_of_run = weights.name == WEIGHTS_FILE and names_model(weights.parent.name)
    return RunRef(run_id=weights.parent.name) if is_of_run and config["cache"]["digest"] == cache.digest else None


def _champion(storage: Storage, spark_config: SparkConfig, name: str | None) -> ModelRef:
    """Return the champion of a registered model, by default that of the table `images`."""
    path = storage.table("images")
    if name is None:
        newest = try_without_spark(lambda session: snapshots.newest_snapshot(session, path), spark_config, storage)
        name = None if newest is None else derived_model_name(newest.table, storage)
    with reachable(storage):
        model = None if name is None else model_with_alias(storage, name, CHAMPION)
    if model is None:
        of = f"the table '{path}'" if name is None else f"the registered model '{name}'"
        raise WrongInput(
            f"train.weights is '{CHAMPION}', and {of} has no champion",
            setting="train.weights",
            way_out="train with DEFAULT and promote first, or give the id of an MLflow run",
        )
    return model


def _with_file(train: TrainConfig, model: ModelRef | RunRef, storage: Storage) -> TrainConfig:
    """Return settings whose weights are the file of a model, which is fetched unless it is in the home."""
    root = Path(storage.home) / "weights"
    folder = root / model.run_id
    if not _is_whole(folder):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        with TemporaryDirectory(dir=root) as scratch:
            fetched = Path(scratch) / "model"
            if isinstance(model, ModelRef):
                fetch_registered(storage, model, fetched)
            else:
                _fetch_run(storage, model, fetched)
            try:
                os.replace(fetched, folder)
            except OSError:
                if not _is_whole(folder):  # Else another process was faster.
                    raise
        logger.info("the model of MLflow run %s, from which training starts, is in '%s'", model.run_id, folder)
    os.utime(folder)
    _sweep(root, train.keep_checkpoint_days)
    return train.model_copy(update={"weights": str(folder / WEIGHTS_FILE)})


def _is_whole(folder: Path) -> bool:
    return (folder / WEIGHTS_FILE).is_file() and (folder / DESCRIPTION_FILE).is_file()


def _fetch_run(storage: Storage, run: RunRef, folder: Path) -> None:
    try:
        with reachable(storage):
            logged_training(storage, run.run_id)
        fetch_logged(storage, run, folder)
    except WrongInput as error:
        raise WrongInput(
            f"train.weights is the id of an MLflow run without a model ({error.cause})",
            setting="train.weights",
            way_out="give a finished run of the flow train, train-distributed or tune",
        ) from None


def _sweep(root: Path, keep_days: int) -> None:
    """Remove models that no training run has started from for `keep_days`; 0 removes none."""
    before = time.time() - keep_days * DAY_SECONDS
    for folder in root.iterdir() if keep_days else ():
        with suppress(FileNotFoundError):  # Another process removes it as well.
            if folder.stat().st_mtime < before:
                shutil.rmtree(folder)
                logger.info("%s removed: no training run has started from it for %d days", folder, keep_days)
