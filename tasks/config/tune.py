"""What a person fills in on a search for hyper-parameters: the space, the trials, and where these run."""

from collections.abc import Iterator, Mapping
from itertools import islice, product
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from tasks.config.cache import IMAGE_SIZE
from tasks.config.form import Schema, always, when, when_given
from tasks.config.frozen import FrozenConfig
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, NETWORK_RULES, TrainConfig, TrainRun
from tasks.config.values import YEAR_SECONDS, RunId
from tasks.errors import explain

NOT_SEARCHED = {
    "monitor": "trials are compared by it",
    "max_epochs": "it is what a pruned trial gets less of (tune.max_epochs bounds the trials')",
    "weights": "they belong to one model",
    "augmentation": "it is a group of settings and no number or name",
    "fine_tune": "it is a list of stages and no number or name",
    "device": "it decides where a training runs and not how good it gets",
    "num_threads": "it decides how fast a training runs and not how good it gets",
    "timeout_seconds": "it decides when a training is ended and not how good it gets",
    "max_seconds": "it would make a trial's result depend on how busy the machine is",
    "checkpoint_seconds": "it decides what is kept of a training and not how good it gets",
    "keep_checkpoints": "it decides what is kept of a training and not how good it gets",
    "keep_checkpoint_days": "it decides what is kept of a training and not how good it gets",
    "feature_cache": "it decides how fast a training runs and not how good it gets",
    "compile": "it decides how fast a training runs and not how good it gets",
}
"""Settings of a training that no search varies, and why."""

SEARCHED = TrainConfig.model_fields.keys() - NOT_SEARCHED.keys()

MOST_CORNERS = 20_000
"""Combinations of extreme values that are checked before the search, a second's work; a trial checks its own again."""


class Range(FrozenConfig):
    """Numbers from `low` to `high`, both included; whole ones where the setting takes no other."""

    rules: ClassVar[tuple[Schema, ...]] = (when("log", True, {"properties": {"low": {"exclusiveMinimum": 0}}}),)

    low: float = Field(description="The least value")
    high: float = Field(description="The greatest value")
    log: bool = Field(False, description="Draw on a logarithmic scale, as suits a learning rate")

    @model_validator(mode="after")
    def _go_from_low_to_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}: make low the smaller one")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low}, which has no logarithm: make low greater than 0, or set log to false")
        return self


class Choices(FrozenConfig):
    """Values of which one is chosen."""

    choices: list[bool | int | float | str | None] = Field(
        min_length=2, max_length=100, description="Values of which one is chosen: numbers, names, true and false"
    )

    @model_validator(mode="after")
    def _have_each_once(self) -> Self:
        if len(set(self.choices)) < len(self.choices):
            raise ValueError(f"choices are {self.choices}, where a value is twice: leave one of the two out")
        return self


def _kind(given: object) -> str:
    names = given if isinstance(given, Mapping) else getattr(type(given), "model_fields", {})
    return "choices" if "choices" in names else "range"


# Told apart by the name `choices`, so that what is said of a wrong one is said of that one alone.
Space = Annotated[Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")], Discriminator(_kind)]
"""What one setting may become."""

DEFAULT_BATCH_SIZES = (16, 32, 64)
DEFAULT_SEARCH: dict[str, Space] = {
    "learning_rate": Range(low=1e-4, high=1e-1, log=True),
    "batch_size": Choices(choices=[*DEFAULT_BATCH_SIZES]),
}


class TuneConfig(FrozenConfig):
    """A search for the best settings of a training."""

    rules: ClassVar[tuple[Schema, ...]] = (
        always({"properties": {"search": {"propertyNames": {"enum": sorted(SEARCHED)}}}}),
    )

    # Empty and not filled in: options of the command line are laid over a default, and a default cannot be taken out.
    search: dict[str, Space] = Field(
        default_factory=dict,
        description="Settings of `train` by name, and what each may become: {low, high, log} or {choices}; empty: "
        "learning_rate from 0.0001 to 0.1, and batch_size 16, 32 or 64, halved until the largest fits the data",
    )
    num_trials: int = Field(20, ge=1, le=100_000, description="Trainings to try, those of earlier runs among them")
    parallel: int = Field(1, ge=1, le=1024, description="Trials at once")
    timeout_seconds: int | None = Field(
        None,
        ge=1,
        le=YEAR_SECONDS,
        description="No trial begins later than this after the search began, in seconds; empty: no bound",
    )
    max_epochs: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="Upper bound of a trial's epochs, not together with train.fine_tune; empty: as many as the best "
        "settings get in any case",
    )
    min_epochs: int = Field(1, ge=1, le=10_000, description="Epochs that a trial gets before it may be pruned")
    reduction_factor: int = Field(
        3, ge=2, le=10, description="Of so many trials one goes on when a bracket of Hyperband is thinned out"
    )
    seed: int = Field(1, ge=0, lt=2**32, description="Seed of what is tried; that of the trainings is train.seed")
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="auto submits trials to the work pool where a Prefect server is configured, and else trains in "
        "place",
    )
    work_pool: str = Field("gpu", min_length=1, description="The deployment's work pool, whose workers run the trials")
    deployment: str = Field(
        "train-trial/train-trial", pattern=r"^[^/]+/[^/]+$", description="Deployment of a trial, flow/deployment"
    )
    submit_timeout_seconds: int = Field(
        300,
        ge=1,
        le=YEAR_SECONDS,
        description="How long a submitted trial may wait while no worker polls the pool, in seconds",
    )
    run_timeout_seconds: int = Field(
        86_400, ge=1, le=YEAR_SECONDS, description="How long a submitted trial may take, in seconds"
    )

    @property
    def space(self) -> dict[str, Space]:
        """What is searched."""
        return self.search or DEFAULT_SEARCH

    def trial_epochs(self, train: TrainConfig) -> int:
        """Return the upper bound of the epochs of all stages of a trial."""
        return self.max_epochs or train.total_epochs

    def decisive(self) -> dict[str, Any]:
        """Return the settings that decide what is tried and how trials are judged; the others may change on the way."""
        space = {name: space.model_dump() for name, space in self.space.items()}
        return {"search": space} | self.model_dump(include={"min_epochs", "reduction_factor", "seed"})


def number_type(name: str) -> type[int] | type[float] | None:
    """Return the type of a setting of `train` that takes numbers, or None."""
    annotation = TrainConfig.model_fields[name].annotation
    # Alternatives may have bounds of their own, and a word may stand beside the numbers.
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    types = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts if not _is_word(part)}
    types -= {NoneType}
    return int if types == {int} else float if types == {float} else None


def _is_word(annotation: object) -> bool:
    return get_origin(annotation) is Literal


def with_values(train: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return the settings with other values in them.

    Raises:
        ValidationError: They cannot be.
    """
    return TrainConfig.model_validate(train.model_dump() | dict(values))


def _ends(name: str, space: Space) -> list[Any]:
    """Return the extreme values of a space; where these can be, what lies between them can be, too."""
    if isinstance(space, Choices):
        return list(space.choices)
    return [int(end) if number_type(name) is int else end for end in (space.low, space.high)]


def corners(search: Mapping[str, Space]) -> Iterator[dict[str, Any]]:
    """Yield every combination of extreme values."""
    for values in product(*(_ends(name, space) for name, space in search.items())):
        yield dict(zip(search, values, strict=True))


def _check_setting(name: str, space: Space) -> None:
    if name not in TrainConfig.model_fields:
        raise ValueError(f"tune.search has '{name}', which is no setting of train: check its spelling, or remove it")
    if name in NOT_SEARCHED:
        raise ValueError(f"tune.search has '{name}', which is not searched, since {NOT_SEARCHED[name]}: remove it")
    if isinstance(space, Choices):
        return
    number = number_type(name)
    if number is None:
        raise ValueError(
            f"tune.search.{name} has low {space.low} and high {space.high}, but train.{name} takes no numbers: "
            "give choices"
        )
    if number is int and not (space.low.is_integer() and space.high.is_integer()):
        raise ValueError(
            f"tune.search.{name} has low {space.low} and high {space.high}, but train.{name} takes whole numbers: "
            "give such"
        )


class TuneRun(TrainRun):
    """Parameters of the flow `tune`."""

    first = (
        {"num_trials": ("tune", "num_trials"), "parallel": ("tune", "parallel")}
        | NETWORK
        | IMAGE_SIZE
        | DEVICE_AND_EPOCHS
    )
    rules = (
        *NETWORK_RULES,
        {
            "if": {"not": {"properties": {"tune": {"not": when_given("max_epochs", {})["if"]}}}},
            "then": {"properties": {"train": {"properties": {"fine_tune": {"maxItems": 0}}}}},
        },
    )

    tune: TuneConfig = TuneConfig()

    @model_validator(mode="after")
    def _search_what_can_be_trained(self) -> Self:
        for name, space in self.tune.space.items():
            _check_setting(name, space)
        for values in islice(corners(self.tune.space), MOST_CORNERS):
            try:
                with_values(self.train, values)
            except ValidationError as error:
                raise ValueError(
                    f"tune.search can draw {values}, which train refuses ({explain(error)}): take that out of it"
                ) from None
        return self

    @model_validator(mode="after")
    def _leave_epochs_to_prune(self) -> Self:
        bound, epochs = self.tune.max_epochs, self.tune.trial_epochs(self.train)
        if bound is not None and self.train.fine_tune:
            raise ValueError(
                f"tune.max_epochs is {bound}, and train.fine_tune has {len(self.train.fine_tune)} stages, of which a "
                "shorter trial would say too little: leave one of the two out"
            )
        if bound is not None and bound > self.train.max_epochs:
            raise ValueError(
                f"tune.max_epochs is {bound}, more than train.max_epochs {self.train.max_epochs}, which the best "
                "settings are trained for in the end: lower the one or raise the other"
            )
        if self.tune.min_epochs > epochs:
            raise ValueError(
                f"tune.min_epochs is {self.tune.min_epochs}, but a trial has at most {epochs} epochs: lower it"
            )
        return self


class TrialRun(TrainRun):
    """Parameters of the flow `train-trial`: one training of a search, which reports to its study."""

    rules = (*NETWORK_RULES, {"dependentRequired": {"study": ["number"], "number": ["study"]}})

    tune: TuneConfig = Field(TuneConfig(), description="The search, by whose rules the trial is pruned")
    study: str | None = Field(
        None, description="Name of the study below storage.home; empty: a training that is no trial"
    )
    number: int | None = Field(None, ge=0, lt=2**31, description="Number of the trial in its study")
    parent_run_id: RunId | None = Field(
        None, description="MLflow run of the search, which the trial's run is shown under"
    )

    @model_validator(mode="after")
    def _name_study_and_number(self) -> Self:
        if (self.study is None) != (self.number is None):
            raise ValueError(
                f"study is {self.study!r} and number is {self.number!r}: give both for a trial, neither for a training"
            )
        return self
