"""Parameters of batch inference."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import StageTimeout
from tasks.credentials import Url


class PredictConfig(FrozenConfig):
    """Batch inference with the champion."""

    table: Url | None = Field(
        None,
        description="Delta table with the columns sha256 and content, which may hold images that the model was not "
        "trained on; empty: the table `images`",
    )
    predictions: Url | None = Field(
        None, description="Delta table to write; empty: `predictions` beside the table `images`"
    )
    alias: str = Field(
        "champion", pattern=r"^[a-zA-Z_-]+$", description="Alias of the registered model version to predict with"
    )
    batch_size: int = Field(64, ge=1, le=4096, description="Images per forward pass")
    top_k: int = Field(5, ge=1, le=1000, description="Number of most probable classes to write for each image")
    min_probability: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Probability of the most probable class below which the label is 'unsure'; existing predictions "
        "keep their labels",
    )
    max_error_fraction: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Maximum fraction of images with an error instead of a label; above it, from 10 errors on, the run "
        "fails and writes nothing",
    )
    retry_errors: bool = Field(
        False, description="Predict images with an error again, and replace their rows; otherwise they keep the error"
    )
    timeout_seconds: StageTimeout = Field(
        86_400, description="Timeout of inference, in seconds; it is retried twice, each time with this timeout"
    )


class PredictRun(SparkRun):
    """Parameters of the flow `predict-batch`."""

    first_screen = TABLES | MODEL_NAME | {name: ("predict", name) for name in ("alias", "table", "predictions")}

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table"
    )
    predict: PredictConfig = PredictConfig()
