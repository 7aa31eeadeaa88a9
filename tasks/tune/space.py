"""What a search draws from, in Optuna's terms, and the name of the study that draws from it."""

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tasks.cache.manifest import CacheManifest
from tasks.config.train import TrainConfig
from tasks.config.tune import DEFAULT_BATCH_SIZES, Choices, Space, TuneConfig, corners, number_type, with_values
from tasks.errors import WrongInput
from tasks.refs import CacheRef
from tasks.schema import TRAIN
from tasks.train.batches import check_batches, check_data
from tasks.train.identity import run_key

logger = logging.getLogger("lakevision.tune")


def distributions(search: Mapping[str, Space]) -> dict[str, BaseDistribution]:
    """Return Optuna's distribution of each setting that is searched."""
    return {name: _distribution(name, space) for name, space in search.items()}


def _distribution(name: str, space: Space) -> BaseDistribution:
    if isinstance(space, Choices):
        return CategoricalDistribution(space.choices)
    if number_type(name) is int:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)


def fit_to_data(train: TrainConfig, tune: TuneConfig, manifest: CacheManifest) -> TuneConfig:
    """Return the search as it is for a cache, of which every batch that it draws can be trained.

    Raises:
        WrongInput: As `fit_batches`, or a metric that says nothing of these classes.
    """
    rows = manifest.splits[TRAIN].rows
    fitted = fit_batches(train, tune, rows)
    if fitted != tune:
        logger.warning(
            "the split 'train' has %d images: train.batch_size is drawn from %s, where tune.search names no others",
            rows,
            [values["batch_size"] for values in corners({"batch_size": fitted.space["batch_size"]})],
        )
    check_data(with_values(train, {"batch_size": 1}), manifest, num_ranks=1)
    return fitted


def fit_batches(train: TrainConfig, tune: TuneConfig, num_images: int) -> TuneConfig:
    """Return the search as it is for so many images to train on.

    The default search draws smaller batches where there are few: it runs on 4 images or more. What a person asked for
    is not changed, and refused here, since a trial that cannot be trained would end every run of the search.

    Args:
        train: The settings that are not searched.
        tune: The search.
        num_images: Of the split `train`, from which the trials train, each in one process.

    Raises:
        WrongInput: A batch larger than that.
    """
    if not tune.search:
        tune = _with_smaller_batches(tune, num_images)
    if "batch_size" not in tune.space:
        check_batches(train, 1, num_images)
        return tune
    for values in corners({"batch_size": tune.space["batch_size"]}):
        try:
            check_batches(with_values(train, values), 1, num_images)
        except WrongInput as error:
            raise WrongInput(f"tune.search can draw {values}; take that out of the search: {error}") from None
    return tune


def _with_smaller_batches(tune: TuneConfig, num_images: int) -> TuneConfig:
    sizes = set(DEFAULT_BATCH_SIZES)
    # Never to 1, of which a batch norm has no variance; who has fewer than 4 images has nothing to search with.
    while max(sizes) > max(4, num_images):
        sizes = {max(2, size // 2) for size in sizes}
    if sizes == set(DEFAULT_BATCH_SIZES):
        return tune
    return tune.model_copy(update={"search": tune.space | {"batch_size": Choices(choices=sorted(sizes))}})


def trial_config(train: TrainConfig, tune: TuneConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return what a trial trains: the values drawn for it, and a trial's epochs.

    Raises:
        ValidationError: The values cannot be.
    """
    bound = {} if tune.max_epochs is None else {"max_epochs": tune.max_epochs}
    return with_values(train, {**values, **bound})


def study_name(train: TrainConfig, tune: TuneConfig, cache: CacheRef) -> str:
    """Name a study by everything that decides it, so that the same search goes on where it was.

    What the searched settings are in `train` does not count, nor does how many trials there are to be: a search that
    is given more of them goes on.
    """
    # All that decides a training is in its key; where settings are searched, any value of theirs stands for all.
    key = run_key(trial_config(train, tune, next(corners(tune.space))), cache, None)
    decisive = {"training": key, "tune": tune.decisive()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
