"""Parameters of a hyper-parameter search: the space, the trials, and where they run."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice, product
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from tasks.config import submitted
from tasks.config.cache import IMAGE_SIZE
from tasks.config.frozen import FrozenConfig, hashed_settings
from tasks.config.recipe import total_epochs
from tasks.config.run import TABLES
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainConfig, TrainRun
from tasks.config.values import Epochs, RunId, Seconds
from tasks.errors import WrongInput, explain, similar_names

NOT_SEARCHED = {
    "monitor": "trials are compared by it",
    "max_epochs": "pruning reduces it (tune.max_epochs limits the epochs of a trial)",
    "weights": "they belong to one model",
    "reference_batch_size": "it only scales the learning rate, which can be searched itself",
    "augmentation": "it is a group of settings and not a number or name",
    "fine_tune": "it is a list of phases and not a number or name",
    "device": "it determines where a training run executes and not its result",
    "num_threads": "it determines the speed of a training run and not its result",
    "environment": "it is a list of names and not a number or name",
    "timeout_seconds": "it determines when a training run is stopped and not its result",
    "stall_timeout_seconds": "it determines when a training run is stopped and not its result",
    "max_seconds": "it would make a trial's result depend on the load of the machine",
    "checkpoint_seconds": "it determines the checkpoints of a training run and not its result",
    "keep_checkpoints": "it determines the checkpoints of a training run and not its result",
    "keep_checkpoint_days": "it determines the checkpoints of a training run and not its result",
    "feature_cache": "it determines the speed of a training run and not its result",
    "compile": "it determines the speed of a training run and not its result",
}
"""Settings of a training run that a search does not vary, and the reason."""

SEARCHED = TrainConfig.model_fields.keys() - NOT_SEARCHED.keys()

MAX_CORNERS = 20_000
"""Combinations of extreme values checked before the search, in about a second; a trial checks its own again."""


class Range(FrozenConfig):
    """Numbers from `low` to `high`, both included; integers if the setting takes only integers."""

    low: float = Field(description="Lower bound, included")
    high: float = Field(description="Upper bound, included")
    log: bool = Field(False, description="Sample on a logarithmic scale, as is usual for a learning rate")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise WrongInput(
                f"low is {self.low} and high is {self.high}", setting="low", way_out="make low the smaller one"
            )
        if self.log and self.low <= 0:
            raise WrongInput(
                f"low is {self.low}, which has no logarithm",
                setting="low",
                way_out="make low greater than 0, or set log to false",
            )
        return self


class Choices(FrozenConfig):
    """Values to sample from."""

    choices: list[bool | int | float | str | None] = Field(
        min_length=2, max_length=100, description="Values to sample from: numbers, names, true and false"
    )

    @model_validator(mode="after")
    def _check_duplicates(self) -> Self:
        if len(set(self.choices)) < len(self.choices):
            raise WrongInput(
                f"choices are {self.choices}, where a value occurs twice",
                setting="choices",
                way_out="leave one of the two out",
            )
        return self


def _kind(given: object) -> str:
    names = given if isinstance(given, Mapping) else getattr(type(given), "model_fields", {})
    return "choices" if "choices" in names else "range"


# Discriminated by the name `choices`, so that an error concerns the alternative that was given, and not both.
Space = Annotated[Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")], Discriminator(_kind)]
"""Values that a search may give to one setting."""

DEFAULT_BATCH_SIZES = (16, 32, 64)
DEFAULT_SEARCH: dict[str, Space] = {
    "learning_rate": Range(low=1e-4, high=1e-1, log=True),
    "batch_size": Choices(choices=[*DEFAULT_BATCH_SIZES]),
}


class TuneConfig(FrozenConfig):
    """Search for the best hyper-parameters of a training run."""

    # Empty by default: command-line options are merged into the default, and could not remove entries from it.
    search: dict[str, Space] = Field(
        default_factory=dict,
        description="Search space: settings of `train` by name, each with {low, high, log} or {choices}. Empty: "
        "learning_rate from 0.0001 to 0.1, and batch_size 16, 32 or 64, halved until the largest fits the data",
        json_schema_extra={"propertyNames": {"enum": [*sorted(SEARCHED)]}},
    )
    num_trials: int = Field(
        20, ge=1, le=100_000, description="Number of trials, including those of earlier runs of the search"
    )
    parallel: int = Field(1, ge=1, le=1024, description="Number of trials that run in parallel")
    timeout_seconds: Seconds | None = Field(
        None,
        description="Time limit for the start of trials, in seconds after the start of the search; empty: no limit",
    )
    max_epochs: Epochs | None = Field(
        None,
        description="Maximum number of epochs per trial, not allowed with train.fine_tune; empty: the epochs of the "
        "final training run with the best settings",
    )
    min_epochs: Epochs = Field(1, description="Number of epochs before a trial may be pruned")
    reduction_factor: int = Field(
        3, ge=2, le=10, description="Reduction factor of Hyperband: of this many trials in a bracket, one continues"
    )
    seed: int = Field(1, ge=0, lt=2**32, description="Seed of the sampler; the seed of the training runs is train.seed")
    where: Literal["auto", "work_pool", "in_place"] = Field(
        "auto",
        description="work_pool: submit trials to the work pool; in_place: train where the flow runs. auto: work_pool "
        "if a Prefect server is configured, else in_place",
    )
    work_pool: str = Field("gpu", min_length=1, description="Work pool of the deployment, whose workers run the trials")
    deployment: submitted.Deployment = "train-trial/train-trial"
    job_variables: submitted.RunJobVariables = Field(default_factory=dict)
    submit_timeout_seconds: submitted.SubmitTimeout = 300
    start_timeout_seconds: submitted.StartTimeout = 1800
    heartbeat_timeout_seconds: submitted.HeartbeatTimeout = 900
    run_timeout_seconds: submitted.RunTimeout = 86_400

    @property
    def space(self) -> dict[str, Space]:
        """Search space: `search`, or the default one if it is empty."""
        return self.search or DEFAULT_SEARCH

    def trial_epochs(self, train: TrainConfig) -> int:
        """Return the maximum number of epochs of a trial over all phases."""
        return self.max_epochs or total_epochs(searched(train))

    def decisive(self) -> dict[str, Any]:
        """Return the settings that determine sampling and pruning; the others may change when a search resumes."""
        space = {name: hashed_settings(space, type(space).model_fields) for name, space in self.space.items()}
        return {"search": space} | hashed_settings(self, {"min_epochs", "reduction_factor", "seed"})


@cache
def number_type(name: str) -> type[int] | type[float] | None:
    """Return the type of the numbers that a setting of `train` takes, or None if it takes other values."""
    schema = TrainConfig.model_json_schema()["properties"][name]
    # None and a name may be alternatives to a number.
    types = {one.get("type") for one in (schema, *schema.get("anyOf", ()))} - {None, "null", "string"}
    return int if types == {"integer"} else float if types == {"number"} else None


def searched(train: TrainConfig) -> TrainConfig:
    """Return the settings of a search: auto trains the head alone, as the speed of the machine decides on more."""
    return train.model_copy(update={"recipe": "head"}) if train.recipe == "auto" and train.plans_fine_tuning else train


def with_values(train: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return the settings with these values in place of their own.

    Raises:
        ValidationError: The result is invalid.
    """
    return TrainConfig.model_validate(searched(train).model_dump() | dict(values))


def _ends(name: str, space: Space) -> list[Any]:
    """Return the extreme values of a space; if they are valid, so are all values between them."""
    if isinstance(space, Choices):
        return list(space.choices)
    return [int(end) if number_type(name) is int else end for end in (space.low, space.high)]


def corners(search: Mapping[str, Space]) -> Iterator[dict[str, Any]]:
    """Yield every combination of extreme values."""
    for values in product(*(_ends(name, space) for name, space in search.items())):
        yield dict(zip(search, values, strict=True))


def _check_setting(name: str, space: Space) -> None:
    if name not in TrainConfig.model_fields:
        raise WrongInput(
            f"tune.search has '{name}', which is not a setting of train",
            setting="tune.search",
            way_out=similar_names(name, TrainConfig.model_fields, "check its spelling, or remove it"),
        )
    if name in NOT_SEARCHED:
        raise WrongInput(
            f"tune.search has '{name}', which is not searched, since {NOT_SEARCHED[name]}",
            setting="tune.search",
            way_out="remove it",
        )
    if isinstance(space, Choices):
        return
    number = number_type(name)
    if number is None:
        raise WrongInput(
            f"tune.search.{name} has low {space.low} and high {space.high}, but train.{name} does not take numbers",
            setting=f"tune.search.{name}",
            way_out="give choices",
        )
    if number is int and not (space.low.is_integer() and space.high.is_integer()):
        raise WrongInput(
            f"tune.search.{name} has low {space.low} and high {space.high}, but train.{name} takes integers",
            setting=f"tune.search.{name}",
            way_out="give integers",
        )


class TuneRun(TrainRun):
    """Parameters of the flow `tune`."""

    first_screen = (
        {name: ("tune", name) for name in ("num_trials", "parallel")}
        | NETWORK
        | IMAGE_SIZE
        | DEVICE_AND_EPOCHS
        | TABLES
    )

    tune: TuneConfig = TuneConfig()

    @model_validator(mode="after")
    def _check_trials(self) -> Self:
        for name, space in self.tune.space.items():
            _check_setting(name, space)
        for values in islice(corners(self.tune.space), MAX_CORNERS):
            try:
                with_values(self.train, values)
            except ValidationError as error:
                raise WrongInput(
                    f"tune.search can draw {values}, which train refuses ({explain(error)})",
                    setting="tune.search",
                    way_out="remove it from the search",
                ) from None
        bound, epochs = self.tune.max_epochs, self.tune.trial_epochs(self.train)
        if bound is not None and self.train.fine_tune:
            raise WrongInput(
                f"tune.max_epochs is {bound}, and train.fine_tune has {len(self.train.fine_tune)} phases, which a "
                "shorter trial cannot assess",
                setting="tune.max_epochs",
                way_out="leave one of the two out",
            )
        final = total_epochs(searched(self.train))
        if bound is not None and bound > final:
            raise WrongInput(
                f"tune.max_epochs is {bound}, more than the {final} of the final training run (train.max_epochs)",
                setting="tune.max_epochs",
                way_out="lower the one or raise the other",
            )
        if self.tune.min_epochs > epochs:
            raise WrongInput(
                f"tune.min_epochs is {self.tune.min_epochs}, but a trial has at most {epochs} epochs",
                setting="tune.min_epochs",
                way_out="lower it",
            )
        return self


class TrialRun(TrainRun):
    """Parameters of the flow `train-trial`: one trial of a search, which reports to its study."""

    tune: TuneConfig = Field(TuneConfig(), description="Search that the trial belongs to, with its rules of pruning")
    study: str | None = Field(
        None, description="Name of the study below storage.home; empty: a training run outside a search"
    )
    number: int | None = Field(None, ge=0, lt=2**31, description="Number of the trial in its study")
    parent_run_id: RunId | None = Field(None, description="MLflow run of the search, the parent of the trial's run")

    @model_validator(mode="after")
    def _check_study_and_number(self) -> Self:
        if (self.study is None) != (self.number is None):
            raise WrongInput(
                f"study is {self.study!r} and number is {self.number!r}",
                setting="study",
                way_out="give both for a trial, neither otherwise",
            )
        return self
