"""Parameters of batch inference."""

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.credentials import Url


class PredictConfig(FrozenConfig):
    """Batch inference with the champion."""

    table: Url | None = Field(
        None,
        description="Delta table with columns sha256 and content, also one that the model was not trained on; empty: "
        "the table `images`",
    )
    predictions: Url | None = Field(None, description="Delta table to write; empty: `predictions` among the tables")
    alias: str = Field(
        "champion", pattern=r"^[a-zA-Z_-]+$", description="Alias of the registered model version to predict with"
    )
    batch_size: int = Field(64, ge=1, le=4096, description="Images a forward pass")


class PredictRun(SparkRun):
    """Parameters of the flow `predict-batch`."""

    first = TABLES | MODEL_NAME | {name: ("predict", name) for name in ("alias", "table", "predictions")}

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Names the registered model; empty: the one that is trained from the table"
    )
    predict: PredictConfig = PredictConfig()
