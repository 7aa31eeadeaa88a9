"""One model a flow: the parameters it takes, in the order of the data."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tasks.config.data import CacheConfig, EtlConfig, MaintainConfig
from tasks.config.model import DistributedConfig, PredictConfig, PromoteConfig
from tasks.config.storage import Settings, SparkConfig, StorageConfig
from tasks.config.train import TrainConfig


class SparkRun(Settings):
    """What every flow that runs Spark takes."""

    storage: StorageConfig = StorageConfig()
    spark: SparkConfig = SparkConfig()


class EtlRun(SparkRun):
    """Parameters of the flow `etl`."""

    etl: EtlConfig = EtlConfig()


class CacheRun(SparkRun):
    """Parameters of the flow `cache`."""

    cache: CacheConfig = CacheConfig()
    table_version: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Version of the table `images`; empty: the latest"
    )


class TrainRun(CacheRun):
    """Parameters of the flow `train`."""

    train: TrainConfig = TrainConfig()


class TrainDistributedRun(TrainRun):
    """Parameters of the flow `train-distributed`, which runs the ranks where it runs itself."""

    distributed: DistributedConfig = DistributedConfig()


class RepeatRun(SparkRun):
    """Parameters of the flow `repeat`."""

    run_id: str | None = Field(None, description="MLflow run to repeat; empty: the newest finished training")


class PromoteRun(Settings):
    """Parameters of the flow `promote`."""

    run_ids: list[str] = Field(
        default_factory=list,
        description="MLflow runs to choose from; empty: the newest finished run and all on the same cache",
    )
    storage: StorageConfig = StorageConfig()
    promote: PromoteConfig = PromoteConfig()


class PredictRun(SparkRun):
    """Parameters of the flow `predict-batch`."""

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Names the registered model; empty: the one that is trained from the table"
    )
    predict: PredictConfig = PredictConfig()


class MaintainRun(SparkRun):
    """Parameters of the flow `maintain`."""

    maintain: MaintainConfig = MaintainConfig()


class PipelineConfig(SparkRun):
    """Parameters of the whole DAG."""

    etl: EtlConfig = EtlConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    promote: PromoteConfig = PromoteConfig()
    predict: PredictConfig = PredictConfig()

    @model_validator(mode="after")
    def _predict_with_what_was_promoted(self) -> Self:
        if self.predict.alias != "champion":
            raise ValueError(
                f"predict.alias is '{self.predict.alias}', but the DAG predicts with the champion it promotes: "
                "leave it out, or run the flow predict-batch alone"
            )
        return self
