"""Validation of the search space, and its fit to the number of images."""

from collections.abc import Callable
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import ValidationError

from tasks.cache.manifest import open_cache
from tasks.config.train import FineTunePhase, TrainConfig
from tasks.config.tune import NOT_SEARCHED, Choices, Range, TrialRun, TuneConfig, TuneRun
from tasks.errors import WrongInput, explain
from tasks.refs import CacheRef
from tasks.tune.space import distributions, fit_to_data, study_name, trial_config

TRAIN = TrainConfig(model="resnet18", weights="none", freeze_backbone=False, max_epochs=9)
CACHE = CacheRef(url="/cache", digest="d")


def error_of(search: dict[str, Any], **settings: Any) -> str:
    """Return the error message of an invalid search."""
    with pytest.raises(ValidationError) as error:
        TuneRun.model_validate({"train": TRAIN.model_dump(), "tune": {"search": search} | settings})
    return explain(error.value)


def test_default_search_is_valid_for_the_default_training_settings() -> None:
    """The flow runs without any settings."""
    assert set(TuneRun().tune.space) == {"learning_rate", "batch_size"}


def test_search_survives_a_json_round_trip() -> None:
    """Prefect stores settings as JSON: a worker reads true and not 1, and a range stays a range."""
    given = TuneConfig(
        search={
            "freeze_backbone": Choices(choices=[True, False]),
            "batch_size": Choices(choices=[8, 16]),
            "max_gradient_norm": Choices(choices=[None, 0.5]),
            "learning_rate": Range(low=1e-4, high=1e-1, log=True),
        }
    )

    again = TuneConfig.model_validate_json(given.model_dump_json())

    assert again == given
    assert again.search["freeze_backbone"].model_dump() == {"choices": [True, False]}


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"learning_rate": {"low": 0.1}}, "tune.search.learning_rate.range.high is missing: give it a value"),
        ({"learning_rate": {"choices": [0.1]}}, "tune.search.learning_rate.choices.choices is [0.1]: list should have"),
        (
            {"lr": {"low": 0.1, "high": 0.2}},
            "tune.search has 'lr', which is not a setting of train: check its spelling",
        ),
        (
            {"augmentation": {"low": 0.0, "high": 1.0}},
            "tune.search has 'augmentation', which is not searched, since it is a group of settings",
        ),
        (
            {"augmentation": {"choices": ["none", "flip"]}},
            "tune.search has 'augmentation', which is not searched, since it is a group of settings",
        ),
        (
            {"fine_tune": {"low": 1, "high": 3}},
            "tune.search has 'fine_tune', which is not searched, since it is a list of phases",
        ),
        (
            {"fine_tune": {"choices": [1, 2]}},
            "tune.search has 'fine_tune', which is not searched, since it is a list of phases",
        ),
        ({"monitor": {"choices": ["val_loss", "val_accuracy"]}}, "which is not searched, since trials are compared by"),
        ({"learning_rate": {"low": 0.1, "high": 20.0}}, "learning_rate is 20.0: input should be less than or equal to"),
        ({"batch_size": {"choices": [0, 8]}}, "batch_size is 0: input should be greater than or equal to 1"),
        ({"batch_size": {"low": 1.5, "high": 8}}, "train.batch_size takes integers: give integers"),
        (
            {"class_weights": {"choices": ["none", "rare"]}},
            "class_weights is 'rare': input should be 'none' or",
        ),
        ({"optimizer": {"low": 1, "high": 2}}, "train.optimizer does not take numbers: give choices"),
        ({"freeze_backbone": {"low": 0, "high": 1}}, "train.freeze_backbone does not take numbers: give choices"),
        ({"freeze_backbone": {"choices": [True, False]}}, "which would train a head on random features"),
        ({"learning_rate": {"low": 0.2, "high": 0.1}}, "low is 0.2 and high is 0.1: make low the smaller one"),
        ({"weight_decay": {"low": 0.0, "high": 0.1, "log": True}}, "low is 0.0, which has no logarithm"),
        ({"batch_size": {"choices": [8, 8]}}, "choices are [8, 8], where a value occurs twice"),
    ],
)
def test_invalid_search_space_is_refused_in_one_sentence(search: dict[str, Any], message: str) -> None:
    """Invalid values, unknown names and invalid combinations are errors."""
    assert message in error_of(search)


def test_searchable_settings_are_scalars() -> None:
    """A new setting of another type must be in NOT_SEARCHED, which refuses it by name."""
    searched = TrainConfig().model_dump(exclude=set(NOT_SEARCHED))

    assert {type(value) for value in searched.values()} <= {int, float, str, bool, type(None)}


def test_invalid_combination_of_values_is_in_the_error() -> None:
    """Each value is valid alone; the value in `train` does not matter, since it is never drawn."""
    search = {"learning_rate": {"choices": [0.1, 0.2]}, "freeze_backbone": {"choices": [False, True]}}

    message = error_of(search)

    assert (
        "can draw {'learning_rate': 0.1, 'freeze_backbone': True}, which train refuses (freeze_backbone is" in message
    )


def test_epochs_of_trials_outside_their_bounds_are_refused() -> None:
    """A trial has at most `train.max_epochs` epochs, and at least `tune.min_epochs`."""
    search = {"learning_rate": {"low": 0.1, "high": 0.2}}
    assert "tune.max_epochs is 10, more than the 9 of the final training run (train.max_epochs)" in error_of(
        search, max_epochs=10
    )
    assert "tune.min_epochs is 4, but a trial has at most 3 epochs" in error_of(search, max_epochs=3, min_epochs=4)


def test_trial_has_the_epochs_of_all_phases() -> None:
    """`tune.max_epochs` would shorten the first phase alone, and is refused with `train.fine_tune`."""
    phases = [FineTunePhase(unfreeze_from="layer4", max_epochs=5), FineTunePhase(unfreeze_from="all", max_epochs=3)]
    train = TrainConfig(recipe="given", max_epochs=9, fine_tune=phases)
    given = {"train": train.model_dump(), "tune": {"min_epochs": 17}}
    tune = TuneRun.model_validate(given).tune

    assert trial_config(train, tune, {}) == train
    assert tune.trial_epochs(train) == 17
    with pytest.raises(
        ValidationError, match="tune.max_epochs is 3, and train.fine_tune has 2 phases, which a shorter"
    ):
        TuneRun.model_validate(given | {"tune": {"max_epochs": 3}})
    with pytest.raises(ValidationError, match="tune.min_epochs is 18, but a trial has at most 17 epochs"):
        TuneRun.model_validate(given | {"tune": {"min_epochs": 18}})


def test_each_setting_has_the_distribution_of_its_type() -> None:
    """Integers, floats, logarithmic ranges and choices have their Optuna distributions."""
    search = {
        "batch_size": Range(low=8, high=64, log=True),
        "learning_rate": Range(low=1e-4, high=1e-1, log=True),
        "weight_decay": Range(low=0.0, high=0.1),
        "max_gradient_norm": Range(low=0.5, high=2.0),
        "optimizer": Choices(choices=["adam", "sgd"]),
    }

    assert distributions(search) == {
        "batch_size": IntDistribution(8, 64, log=True),
        "learning_rate": FloatDistribution(1e-4, 1e-1, log=True),
        "weight_decay": FloatDistribution(0.0, 0.1),
        "max_gradient_norm": FloatDistribution(0.5, 2.0),
        "optimizer": CategoricalDistribution(["adam", "sgd"]),
    }


def test_trial_trains_with_the_values_drawn_and_the_epochs_of_trials() -> None:
    """All other settings are unchanged."""
    tuned = trial_config(TRAIN, TuneConfig(max_epochs=3), {"learning_rate": 0.5, "batch_size": 8})

    assert tuned == TRAIN.model_copy(update={"learning_rate": 0.5, "batch_size": 8, "max_epochs": 3})
    assert trial_config(TRAIN, TuneConfig(), {}) == TRAIN


def test_study_name_depends_only_on_settings_that_affect_results() -> None:
    """Values of searched settings, the number of trials and the place where they run do not affect the name."""
    tune = TuneConfig()
    name = study_name(TRAIN, tune, CACHE)

    same = [
        (TRAIN.model_copy(update={"learning_rate": 0.5, "batch_size": 7, "timeout_seconds": 5}), tune, CACHE),
        (TRAIN, tune.model_copy(update={"num_trials": 99, "parallel": 3, "where": "in_place"}), CACHE),
        (TRAIN, tune, CacheRef(url="/moved", digest="d")),
    ]
    other = [
        (TRAIN.model_copy(update={"weight_decay": 0.5}), tune, CACHE),
        (TRAIN.model_copy(update={"max_epochs": 8}), tune, CACHE),
        (TRAIN, tune.model_copy(update={"seed": 2}), CACHE),
        (TRAIN, tune.model_copy(update={"search": {"learning_rate": Range(low=1e-4, high=0.2)}}), CACHE),
        (TRAIN, tune.model_copy(update={"min_epochs": 2}), CACHE),
        (TRAIN, tune, CacheRef(url="/cache", digest="e")),
    ]
    assert {study_name(*search) for search in same} == {name}
    names = {study_name(*search) for search in other}
    assert len(names) == len(other)
    assert name not in names


def test_trial_needs_both_study_and_number() -> None:
    """One without the other is an error."""
    with pytest.raises(ValidationError, match="study is 's' and number is None: give both for a trial, neither"):
        TrialRun(study="s")

    assert TrialRun().study is None
    assert TrialRun(study="s", number=0).number == 0


@pytest.mark.parametrize(
    ("images", "expected"),
    [(64, [16, 32, 64]), (63, [8, 16, 32]), (20, [4, 8, 16]), (8, [2, 4, 8]), (7, [2, 4]), (4, [2, 4]), (2, [2, 4])],
)
def test_default_search_draws_smaller_batches_for_few_images(
    make_cache: Callable[..., CacheRef], messages_of: Callable[[str], list[str]], images: int, expected: list[int]
) -> None:
    """Smaller batch sizes are logged; the other settings are unchanged."""
    manifest = open_cache(make_cache({"train": images, "val": 3, "test": 3}))

    fitted = fit_to_data(TRAIN, TuneConfig(num_trials=7), manifest)

    assert fitted.space == TuneConfig().space | {"batch_size": Choices(choices=[*expected])}
    assert fitted.num_trials == 7
    sentence = f"the split 'train' has {images} images: train.batch_size is drawn from {expected}"
    assert [sentence in message for message in messages_of("lakevision.tune")] == ([] if images == 64 else [True])


@pytest.mark.parametrize(
    "space", [Choices(choices=[8, 21]), Choices(choices=["auto", 21, 8]), Range(low=8, high=21)], ids=str
)
def test_batch_size_larger_than_the_split_is_refused_in_a_given_search(
    make_cache: Callable[..., CacheRef], space: Choices | Range
) -> None:
    """A search given by the user is not changed; the error has the value and the number of images."""
    manifest = open_cache(make_cache({"train": 20, "val": 3, "test": 3}))
    tune = TuneConfig(search={"batch_size": space, "optimizer": Choices(choices=["adam", "sgd"])})

    with pytest.raises(
        WrongInput,
        match=r"can draw .*: 21., but .* 20 images: .* at most 20",
    ) as refused:
        fit_to_data(TRAIN, tune, manifest)
    assert refused.value.setting == "tune.search"


def test_error_common_to_all_trials_does_not_mention_the_search(make_cache: Callable[..., CacheRef]) -> None:
    """Steps that are not searched, and a metric that is constant for so few classes, are errors of `train`.

    A batch size that is not searched is lowered by the training run.
    """
    manifest = open_cache(make_cache({"train": 20, "val": 3, "test": 3}))
    rates = TuneConfig(search={"learning_rate": Range(low=0.1, high=0.2)})

    assert fit_to_data(TRAIN.model_copy(update={"batch_size": 21}), rates, manifest) == rates
    with pytest.raises(WrongInput, match=r"^train.accumulate_steps is 21, but .* has 20 images"):
        fit_to_data(TRAIN.model_copy(update={"accumulate_steps": 21}), rates, manifest)
    with pytest.raises(WrongInput, match="every epoch of 3 classes") as refused:
        fit_to_data(TRAIN.model_copy(update={"monitor": "val_top5_accuracy"}), TuneConfig(), manifest)
    assert refused.value.setting == "train.monitor"
