"""The search space as Optuna distributions, the checks that each trial can be trained, and the name of the study."""

import hashlib
import json
import logging
from collections.abc import Mapping
from itertools import islice
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tasks.cache.manifest import CacheManifest
from tasks.checks.preflight import train_rows
from tasks.config.train import TrainConfig
from tasks.config.tune import (
    DEFAULT_BATCH_SIZES,
    MAX_CORNERS,
    Choices,
    Space,
    TuneConfig,
    TuneRun,
    corners,
    number_type,
    with_values,
)
from tasks.errors import WrongInput
from tasks.refs import TRAIN, CacheRef, TableRef
from tasks.train.batches import check_batches, check_data
from tasks.train.spec import run_keys

logger = logging.getLogger("lakevision.tune")


def distributions(search: Mapping[str, Space]) -> dict[str, BaseDistribution]:
    """Return the Optuna distribution of each searched setting."""
    return {name: _distribution(name, space) for name, space in search.items()}


def _distribution(name: str, space: Space) -> BaseDistribution:
    if isinstance(space, Choices):
        return CategoricalDistribution(space.choices)
    if number_type(name) is int:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)


def fit_to_data(train: TrainConfig, tune: TuneConfig, manifest: CacheManifest) -> TuneConfig:
    """Return the search with batch sizes that fit the cache.

    Raises:
        WrongInput: As `fit_batches`, or the metric is constant for this number of classes.
    """
    rows = manifest.splits[TRAIN].rows
    fitted = fit_batches(train, tune, rows)
    if fitted != tune:
        logger.warning(
            "the split 'train' has %d images: train.batch_size is drawn from %s; set tune.search to change this",
            rows,
            [values["batch_size"] for values in corners({"batch_size": fitted.space["batch_size"]})],
        )
    check_data(with_values(train, {"batch_size": 1}), manifest, num_ranks=1)
    return fitted


def fit_batches(train: TrainConfig, tune: TuneConfig, num_images: int) -> TuneConfig:
    """Return the search with batch sizes that fit the number of training images.

    The default search draws smaller batches for fewer images. A search given by the user is never changed. An error is
    raised here, since a trial that cannot be trained would end every run of the search.

    Args:
        train: The settings that are not searched.
        tune: The search.
        num_images: Number of images of the split `train`; each trial trains on all of them in one process.

    Raises:
        WrongInput: As `check_batches`, or a given search may draw a batch that would be lowered as another one.
    """
    check_batches(train, 1, num_images)
    if not tune.search:
        return _with_smaller_batches(tune, num_images)
    for values in corners({"batch_size": tune.space["batch_size"]}) if "batch_size" in tune.space else ():
        drawn = with_values(train, values)
        if drawn.batch_size != (most := drawn.fitting_batch(1, num_images)):
            steps = f", accumulated over {train.accumulate_steps} batches" if train.accumulate_steps > 1 else ""
            raise WrongInput(
                f"tune.search can draw {values}{steps}, but the split 'train' has {num_images} images",
                setting="tune.search",
                way_out=f"remove it from the search, and draw at most {most}",
            )
    return tune


def _with_smaller_batches(tune: TuneConfig, num_images: int) -> TuneConfig:
    sizes = set(DEFAULT_BATCH_SIZES)
    # Never 1, for which batch norm has no variance, and two to draw from; 4 are lowered where there are fewer images.
    while max(sizes) > max(4, num_images):
        sizes = {max(2, size // 2) for size in sizes}
    if sizes == set(DEFAULT_BATCH_SIZES):
        return tune
    return tune.model_copy(update={"search": tune.space | {"batch_size": Choices(choices=sorted(sizes))}})


def trial_config(train: TrainConfig, tune: TuneConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return the training settings of a trial: `train` with the values drawn and the number of epochs of a trial.

    Raises:
        ValidationError: The values are invalid.
    """
    bound = {} if tune.max_epochs is None else {"max_epochs": tune.max_epochs}
    return with_values(train, {**values, **bound})


def study_name(train: TrainConfig, tune: TuneConfig, cache: CacheRef) -> str:
    """Return a study name that is a hash of all settings that affect the results, so that the same search resumes.

    The values of searched settings in `train` and the number of trials do not count: a search resumes with more trials.
    """
    # The key of a run has every setting that affects it; one value stands for all values of a searched setting.
    # The form of older releases, so that their searches resume.
    key = run_keys(trial_config(train, tune, next(corners(tune.space))), cache, None)[-1]
    decisive = {"training": key, "tune": tune.decisive()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def check_search_sizes(config: TuneRun, images: TableRef) -> None:
    """Raise an error if a trial may draw a batch larger than the number of training images.

    Raises:
        WrongInput: As `fit_batches`.
    """
    if rows := train_rows(images):
        fit_batches(config.train, config.tune, rows)


def check_search(config: TuneRun, *, here: bool = True) -> None:
    """Raise an error if a trial could not be trained, before a cache is built for the search.

    Args:
        config: The search.
        here: Whether its trials run on this machine, as in `check_training`.

    Raises:
        WrongInput: Names the setting, its value, and the way out.
    """
    drawn = [with_values(config.train, values) for values in islice(corners(config.tune.space), MAX_CORNERS)]
    from tasks.checks.trainable import check_training  # Here: all three load torch.
    from tasks.model.device import choose_device
    from tasks.model.precision import choose_precision

    for device, precision in {(one.device, one.precision) for one in drawn if here}:
        choose_precision(precision, choose_device(device, 0))
    # Each network is built once, whichever other settings are searched.
    for train in {(one.model, one.weights, one.trained): one for one in drawn}.values():
        check_training(train, config.cache, here=here)
