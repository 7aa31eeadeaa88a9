"""Parameters of the flow `promote`."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from tasks.config.form import Schema, when_given
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import RunId


class PromoteRun(SparkRun):
    """Parameters of the flow `promote`."""

    first_screen = TABLES | MODEL_NAME | {"min_test_accuracy": ("promote", "min_test_accuracy")}

    rules: ClassVar[tuple[Schema, ...]] = (
        when_given("reason", {"required": ["run_ids"], "properties": {"run_ids": {"minItems": 1, "maxItems": 1}}}),
    )

    run_ids: list[RunId] = Field(
        default_factory=list,
        max_length=10_000,
        description="MLflow runs to choose from; empty: the newest finished run on the table `images` and all others "
        "on the same cache",
    )
    reason: str = Field(
        "",
        max_length=500,
        description="Why the run in run_ids replaces a champion that cannot be evaluated, such as one whose files are "
        "lost; it becomes part of the decision. Empty: that champion stays",
    )
    promote: PromoteConfig = PromoteConfig()
    predict: PredictConfig = Field(
        PredictConfig(),
        description="Settings of inference with which the gate predicts test images; they become rows of `predictions`",
    )

    @model_validator(mode="after")
    def _check_reason(self) -> Self:
        """Refuse a reason for a run that is yet to be chosen."""
        if self.reason and len(self.run_ids) != 1:
            raise ValueError(
                f"reason is given, but run_ids has {len(self.run_ids)} runs: give the one run that it is about, or "
                "leave reason empty"
            )
        return self
