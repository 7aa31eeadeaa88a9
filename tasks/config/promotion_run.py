"""Parameters of the flow `promote`."""

from pydantic import Field

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import RunId


class PromoteRun(SparkRun):
    """Parameters of the flow `promote`."""

    first_screen = TABLES | MODEL_NAME | {"min_test_accuracy": ("promote", "min_test_accuracy")}

    run_ids: list[RunId] = Field(
        default_factory=list,
        max_length=10_000,
        description="MLflow runs to choose from; empty: the newest finished run on the table `images` and all others "
        "on the same cache",
    )
    promote: PromoteConfig = PromoteConfig()
    predict: PredictConfig = Field(
        PredictConfig(),
        description="Settings of inference with which the gate predicts test images; they become rows of `predictions`",
    )
