"""What a search may draw: checked against what a training takes, before anything runs."""

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


def refused(search: dict[str, Any], **settings: Any) -> str:
    """Return the one sentence with which a search is refused."""
    with pytest.raises(ValidationError) as error:
        TuneRun.model_validate({"train": TRAIN.model_dump(), "tune": {"search": search} | settings})
    return explain(error.value)


def test_the_default_search_is_valid_for_the_default_training() -> None:
    """The flow runs with nothing filled in."""
    assert set(TuneRun().tune.space) == {"learning_rate", "batch_size"}


def test_a_search_comes_back_from_json() -> None:
    """What Prefect stores and a worker reads is what was given: true is no 1, and a range no choice."""
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
    ("search", "said"),
    [
        ({"learning_rate": {"low": 0.1}}, "tune.search.learning_rate.range.high is missing: give it a value"),
        ({"learning_rate": {"choices": [0.1]}}, "tune.search.learning_rate.choices.choices is [0.1]: list should have"),
        ({"lr": {"low": 0.1, "high": 0.2}}, "tune.search has 'lr', which is no setting of train: check its spelling"),
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
            "tune.search has 'fine_tune', which is not searched, since it is a list of stages",
        ),
        (
            {"fine_tune": {"choices": [1, 2]}},
            "tune.search has 'fine_tune', which is not searched, since it is a list of stages",
        ),
        ({"monitor": {"choices": ["val_loss", "val_accuracy"]}}, "which is not searched, since trials are compared by"),
        ({"learning_rate": {"low": 0.1, "high": 20.0}}, "learning_rate is 20.0: input should be less than or equal to"),
        ({"batch_size": {"choices": [0, 8]}}, "batch_size is 0: input should be greater than or equal to 1"),
        ({"batch_size": {"low": 1.5, "high": 8}}, "train.batch_size takes whole numbers: give such"),
        ({"optimizer": {"choices": ["adam", "lion"]}}, "optimizer is 'lion': input should be 'adam', 'adamw' or 'sgd'"),
        ({"optimizer": {"low": 1, "high": 2}}, "train.optimizer takes no numbers: give choices"),
        ({"freeze_backbone": {"low": 0, "high": 1}}, "train.freeze_backbone takes no numbers: give choices"),
        ({"freeze_backbone": {"choices": [True, False]}}, "which would train a head on random features"),
        ({"learning_rate": {"low": 0.2, "high": 0.1}}, "low is 0.2 and high is 0.1: make low the smaller one"),
        ({"weight_decay": {"low": 0.0, "high": 0.1, "log": True}}, "low is 0.0, which has no logarithm"),
        ({"batch_size": {"choices": [8, 8]}}, "choices are [8, 8], where a value is twice"),
    ],
)
def test_what_no_training_takes_is_refused_in_one_sentence(search: dict[str, Any], said: str) -> None:
    """A value that cannot be, a name that is none, and a pair of values that do not go together."""
    assert said in refused(search)


def test_what_may_be_searched_is_a_number_a_name_or_true_and_false() -> None:
    """A setting of another kind that training gets is refused by name, and not for each value that it cannot have."""
    searched = TrainConfig().model_dump(exclude=set(NOT_SEARCHED))

    assert {type(value) for value in searched.values()} <= {int, float, str, bool, type(None)}


def test_values_that_do_not_go_together_are_named() -> None:
    """Each is possible alone; what is in `train` is no excuse, since it is never drawn."""
    search = {"learning_rate": {"choices": [0.1, 0.2]}, "freeze_backbone": {"choices": [False, True]}}

    said = refused(search)

    assert "can draw {'learning_rate': 0.1, 'freeze_backbone': True}, which train refuses (freeze_backbone is" in said


def test_epochs_that_leave_nothing_to_prune_are_refused() -> None:
    """A trial has no more epochs than the training in the end, and no fewer than it gets in any case."""
    search = {"learning_rate": {"low": 0.1, "high": 0.2}}
    assert "tune.max_epochs is 10, more than train.max_epochs 9" in refused(search, max_epochs=10)
    assert "tune.min_epochs is 4, but a trial has at most 3 epochs" in refused(search, max_epochs=3, min_epochs=4)


def test_a_trial_of_many_stages_has_the_epochs_of_all() -> None:
    """Fewer in its first stage would leave the others as they are, so a bound is refused."""
    stages = [FineTunePhase(unfreeze_from="layer4", max_epochs=5), FineTunePhase(unfreeze_from="all", max_epochs=3)]
    train = TrainConfig(max_epochs=9, fine_tune=stages)
    given = {"train": train.model_dump(), "tune": {"min_epochs": 17}}
    tune = TuneRun.model_validate(given).tune

    assert trial_config(train, tune, {}) == train
    assert tune.trial_epochs(train) == 17
    with pytest.raises(ValidationError, match="tune.max_epochs is 3, and train.fine_tune has 2 stages, of which"):
        TuneRun.model_validate(given | {"tune": {"max_epochs": 3}})
    with pytest.raises(ValidationError, match="tune.min_epochs is 18, but a trial has at most 17 epochs"):
        TuneRun.model_validate(given | {"tune": {"min_epochs": 18}})


def test_each_setting_is_drawn_as_what_it_is() -> None:
    """Whole numbers, numbers on a logarithmic scale, and choices."""
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


def test_a_trial_trains_what_was_drawn_for_as_long_as_trials_do() -> None:
    """Everything else is as it was."""
    tuned = trial_config(TRAIN, TuneConfig(max_epochs=3), {"learning_rate": 0.5, "batch_size": 8})

    assert tuned == TRAIN.model_copy(update={"learning_rate": 0.5, "batch_size": 8, "max_epochs": 3})
    assert trial_config(TRAIN, TuneConfig(), {}) == TRAIN


def test_a_study_is_named_by_what_decides_it() -> None:
    """Not by what is drawn anyway, how many trials there are to be, or where they run."""
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


def test_a_trial_is_named_by_study_and_number() -> None:
    """One without the other names none."""
    with pytest.raises(ValidationError, match="study is 's' and number is None: give both for a trial, neither"):
        TrialRun(study="s")

    assert TrialRun().study is None
    assert TrialRun(study="s", number=0).number == 0


@pytest.mark.parametrize(
    ("images", "expected"),
    [(64, [16, 32, 64]), (63, [8, 16, 32]), (20, [4, 8, 16]), (8, [2, 4, 8]), (7, [2, 4]), (4, [2, 4])],
)
def test_the_default_search_fits_few_images(
    make_cache: Callable[..., CacheRef], said: Callable[[str], list[str]], images: int, expected: list[int]
) -> None:
    """With smaller batches, which is said; what else it draws is as it was."""
    manifest = open_cache(make_cache({"train": images, "val": 3, "test": 3}))

    fitted = fit_to_data(TRAIN, TuneConfig(num_trials=7), manifest)

    assert fitted.space == TuneConfig().space | {"batch_size": Choices(choices=[*expected])}
    assert fitted.num_trials == 7
    sentence = f"the split 'train' has {images} images: train.batch_size is drawn from {expected}"
    assert [sentence in message for message in said("lakevision.tune")] == ([] if images == 64 else [True])


@pytest.mark.parametrize(
    "space", [Choices(choices=[8, 21]), Choices(choices=["auto", 21, 8]), Range(low=8, high=21)], ids=str
)
def test_a_batch_that_a_person_gave_is_refused_where_the_images_are_too_few(
    make_cache: Callable[..., CacheRef], space: Choices | Range
) -> None:
    """Not changed: whoever named it is told which value it is, and how many images there are."""
    manifest = open_cache(make_cache({"train": 20, "val": 3, "test": 3}))
    tune = TuneConfig(search={"batch_size": space, "optimizer": Choices(choices=["adam", "sgd"])})

    with pytest.raises(
        WrongInput,
        match=r"^tune.search can draw .'batch_size': 21.; take that out of the search: train.batch_size is 21, but "
        r"the split 'train' has 20 images, .* give at most 20, or 2 for 10 steps per epoch$",
    ):
        fit_to_data(TRAIN, tune, manifest)


def test_what_is_wrong_with_every_trial_is_not_said_of_the_search(make_cache: Callable[..., CacheRef]) -> None:
    """A batch that is not searched, and a metric that says nothing of so few classes."""
    manifest = open_cache(make_cache({"train": 20, "val": 3, "test": 3}))
    rates = TuneConfig(search={"learning_rate": Range(low=0.1, high=0.2)})

    assert fit_to_data(TRAIN.model_copy(update={"batch_size": 20}), rates, manifest) == rates
    with pytest.raises(WrongInput, match=r"^train.batch_size is 21, but the split 'train' has 20 images"):
        fit_to_data(TRAIN.model_copy(update={"batch_size": 21}), rates, manifest)
    with pytest.raises(WrongInput, match=r"^train.monitor is 'val_top5_accuracy', which is 1 in every epoch of 3 cl"):
        fit_to_data(TRAIN.model_copy(update={"monitor": "val_top5_accuracy"}), TuneConfig(), manifest)
