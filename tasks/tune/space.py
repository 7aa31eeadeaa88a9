"""What a search draws from, in Optuna's terms, and the name of the study that draws from it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tasks.config import Choices, TrainConfig, TuneConfig
from tasks.config.tune import Space, corners, number_type, with_values
from tasks.refs import CacheRef
from tasks.train.identity import run_key


def distributions(search: Mapping[str, Space]) -> dict[str, BaseDistribution]:
    """Return Optuna's distribution of each setting that is searched."""
    return {name: _distribution(name, space) for name, space in search.items()}


def _distribution(name: str, space: Space) -> BaseDistribution:
    if isinstance(space, Choices):
        return CategoricalDistribution(space.choices)
    if number_type(name) is int:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)


def trial_config(train: TrainConfig, tune: TuneConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return what a trial trains: the values drawn for it, and a trial's epochs.

    Raises:
        ValidationError: The values cannot be.
    """
    return with_values(train, {**values, "max_epochs": tune.trial_epochs(train)})


def study_name(train: TrainConfig, tune: TuneConfig, cache: CacheRef) -> str:
    """Name a study by everything that decides it, so that the same search goes on where it was.

    What the searched settings are in `train` does not count, nor does how many trials there are to be: a search that
    is given more of them goes on.
    """
    # All that decides a training is in its key; where settings are searched, any value of theirs stands for all.
    key = run_key(trial_config(train, tune, next(corners(tune.space))), cache, None)
    decisive = {"training": key, "tune": tune.decisive()}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
