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
from tasks.config.train import (
    AugmentationConfig,
    FineTuneStage,
    TrainConfig,
)

__all__ = [
    "BUILTIN_DIGITS",
    "AugmentationConfig",
    "CacheConfig",
    "CacheRun",
    "DistributedConfig",
    "EtlConfig",
    "EtlRun",
    "FineTuneStage",
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
