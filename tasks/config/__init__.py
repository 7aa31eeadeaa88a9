"""What a person fills in: one frozen model a stage, in the order of the data. These models are the Prefect form."""

from tasks.config.data import (
    BUILTIN_DIGITS,
    CacheConfig,
    EtlConfig,
    LabelConfig,
    MaintainConfig,
)
from tasks.config.model import (
    DistributedConfig,
    PredictConfig,
    PromoteConfig,
    TrainConfig,
)
from tasks.config.runs import (
    CacheRun,
    EtlRun,
    MaintainRun,
    PipelineConfig,
    PredictRun,
    PromoteRun,
    TrainDistributedRun,
    TrainRun,
)
from tasks.config.storage import (
    Settings,
    SparkConfig,
    StorageConfig,
)

__all__ = [
    "BUILTIN_DIGITS",
    "CacheConfig",
    "CacheRun",
    "DistributedConfig",
    "EtlConfig",
    "EtlRun",
    "LabelConfig",
    "MaintainConfig",
    "MaintainRun",
    "PipelineConfig",
    "PredictConfig",
    "PredictRun",
    "PromoteConfig",
    "PromoteRun",
    "Settings",
    "SparkConfig",
    "StorageConfig",
    "TrainConfig",
    "TrainDistributedRun",
    "TrainRun",
]
