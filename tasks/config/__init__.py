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
    RepeatRun,
    TrainDistributedRun,
    TrainRun,
)
from tasks.config.sanity import (
    GradientConfig,
    GradientRun,
    OverfitConfig,
    OverfitRun,
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
from tasks.config.tune import (
    Choices,
    Range,
    TrialRun,
    TuneConfig,
    TuneRun,
)

__all__ = [
    "BUILTIN_DIGITS",
    "AugmentationConfig",
    "CacheConfig",
    "CacheRun",
    "Choices",
    "DistributedConfig",
    "EtlConfig",
    "EtlRun",
    "FineTuneStage",
    "GradientConfig",
    "GradientRun",
    "LabelConfig",
    "MaintainConfig",
    "MaintainRun",
    "OverfitConfig",
    "OverfitRun",
    "PipelineConfig",
    "PredictConfig",
    "PredictRun",
    "PromoteConfig",
    "PromoteRun",
    "Range",
    "RepeatRun",
    "Settings",
    "SparkConfig",
    "StorageConfig",
    "TrainConfig",
    "TrainDistributedRun",
    "TrainRun",
    "TrialRun",
    "TuneConfig",
    "TuneRun",
]
