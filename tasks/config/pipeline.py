"""Parameters of the whole DAG, of its part before training, of the search for label errors, and of the ladder."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.cache import IMAGE_SIZE, CacheConfig
from tasks.config.distributed import DistributedConfig, check_options
from tasks.config.etl import REQUIRED_SOURCE, SOURCE, EtlConfig
from tasks.config.frozen import FrozenConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.submitted import SingleConfig
from tasks.config.train import DEVICE_AND_EPOCHS, NETWORK, TrainConfig, TrainRun
from tasks.errors import WrongInput


class VerdictRun(SparkRun):
    """Parameters of the flow `verdict`."""

    first_screen = SOURCE | NETWORK | IMAGE_SIZE | TABLES
    required = REQUIRED_SOURCE

    etl: EtlConfig = EtlConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()


def features_obstacle(train: TrainConfig) -> str | None:
    """Return the reason why a training run with these settings has no cached features that say something, or None."""
    if train.weights == "none":
        return "train.weights is 'none', and features of random weights say nothing about a trained network"
    own = "freeze_backbone or feature_cache is false, the recipe is scratch, or augmentation is set"
    return None if train.makes_features else f"training has no cached features of a frozen backbone: train.{own}"


class LabelErrorsRun(TrainRun):
    """Parameters of the flow `find-label-errors`."""

    first_screen = NETWORK | IMAGE_SIZE | TABLES

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        if (reason := features_obstacle(self.train)) is not None:
            raise WrongInput(f"label errors are found by cached features: {reason}")
        return self


class LadderConfig(FrozenConfig):
    """The sample of the first steps, and the price of a machine."""

    sample_fraction: float = Field(
        0.1, gt=0.0, lt=1.0, description="Fraction of the images in the first three steps, in tables of their own"
    )
    cost_per_hour: float = Field(
        0.0, ge=0.0, le=1e6, description="Price of one machine for an hour, in any currency; 0: costs are left out"
    )


class LadderRun(VerdictRun):
    """Parameters of the flow `scaling-ladder`."""

    distributed: DistributedConfig = DistributedConfig()
    ladder: LadderConfig = LadderConfig()

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        check_options(self.train, self.distributed, self.spark)
        return self


class PipelineConfig(SparkRun):
    """Parameters of the whole DAG."""

    first_screen = SOURCE | NETWORK | IMAGE_SIZE | DEVICE_AND_EPOCHS | MODEL_NAME | TABLES
    required = REQUIRED_SOURCE

    train_on: Literal["single", "distributed", "both"] = Field(
        "single",
        description="Training runs of the DAG. `single`: in one process. `distributed`: with the ranks of distributed. "
        "`both`: one after the other, as the demo does; the better one is promoted",
    )
    etl: EtlConfig = EtlConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    single: SingleConfig = SingleConfig()
    distributed: DistributedConfig = DistributedConfig()
    promote: PromoteConfig = PromoteConfig()
    predict: PredictConfig = PredictConfig()

    @property
    def trains_single(self) -> bool:
        """True if the DAG trains in one process."""
        return self.train_on != "distributed"

    @property
    def trains_distributed(self) -> bool:
        """True if the DAG trains with ranks."""
        return self.train_on != "single"

    @property
    def ranks(self) -> DistributedConfig | None:
        """Settings of the ranks; None if the DAG trains only in one process."""
        return self.distributed if self.trains_distributed else None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.trains_distributed:
            check_options(self.train, self.distributed, self.spark)
        if self.predict.alias != "champion":
            raise WrongInput(
                f"predict.alias is '{self.predict.alias}', but the DAG predicts with the champion it promotes",
                setting="predict.alias",
                way_out="leave it out, or run the flow predict-batch alone",
            )
        if self.predict.table_version is not None and not self.predict.table:
            raise WrongInput(
                f"predict.table_version is {self.predict.table_version}, but the DAG predicts the version of `images` "
                "that it ingests",
                setting="predict.table_version",
                way_out="leave it out, or name the table in predict.table",
            )
        return self
