"""Parameters of the promotion to champion, and of the rollback to the previous one."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.frozen import FrozenConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import Fraction, ModelName, Seconds
from tasks.errors import WrongInput


class PromoteConfig(FrozenConfig):
    """Selection of the champion among training runs."""

    model_name: ModelName | None = Field(
        None,
        description="Name of the registered model; empty: it is named after the folder of the source, such as "
        "lakevision-digits or lakevision-photos",
    )
    min_test_accuracy: Fraction = Field(
        0.0,
        description="Minimum accuracy on the split `test` for promotion; a run that is not better than the champion is "
        "never promoted",
    )
    min_test_macro_f1: Fraction = Field(
        0.0,
        description="Minimum macro F1 on the split `test` for promotion: the mean F1 of all classes, to which a rare "
        "class contributes as much as a frequent one",
    )
    min_accuracy_gain: float = Field(
        0.0,
        ge=-1.0,
        le=1.0,
        description="The accuracy must exceed the champion's on the same images by more than this; negative to accept "
        "a run that is worse by less, -1: no limit. It grows with the number of challengers that these images have "
        "judged",
    )
    max_recall_drop: Fraction = Field(
        0.1, description="Maximum drop of the recall of a class against the champion's; 1: no limit"
    )
    min_class_images: int = Field(
        20,
        ge=1,
        description="Test images of a class from which on max_recall_drop counts as it is; with fewer, a larger drop "
        "counts unless it may be chance",
    )
    max_p_value: Fraction = Field(
        1.0,
        description="Maximum p-value of McNemar's exact test of both models on the same images, such as 0.05; 1: no "
        "limit. It is divided by the number of challengers that these images have judged",
    )
    max_latency_ratio: float | None = Field(
        None,
        gt=0.0,
        description="Maximum time for one image relative to the champion's, measured in this process; empty: no limit",
    )
    max_megabytes: float | None = Field(
        None, gt=0.0, description="Maximum size of the weights, in megabytes (10^6 bytes); empty: no limit"
    )
    allow_fewer_classes: bool = Field(
        False,
        description="Whether a run may replace a champion that has classes which the run lacks, such as after a class "
        "was renamed or removed",
    )
    replace_unusable: bool = Field(
        False,
        description="Whether a run replaces a champion that cannot be evaluated, such as one whose files are lost; "
        "else that champion stays",
    )
    approval: Literal["auto", "human"] = Field(
        "auto",
        description="Who decides on a run that is within all limits; human: a run of the deployment promote asks "
        "in the UI, and no process waits meanwhile",
    )
    approval_seconds: Seconds = Field(
        86_400,
        description="Time limit of the answer, in seconds; after it the run fails and the champion stays",
    )
    timeout_seconds: Seconds = Field(
        86_400, description="Timeout of the promotion, in seconds, for one attempt; a longer attempt is not retried"
    )

    @model_validator(mode="after")
    def _check_p_value(self) -> Self:
        """Refuse a test for a difference where a run that is worse is accepted.

        Its p-value is small for a run that is significantly worse, and 1 for a run that is equal.
        """
        if self.min_accuracy_gain < 0 and self.max_p_value < 1:
            raise WrongInput(
                f"min_accuracy_gain is {self.min_accuracy_gain} and max_p_value is {self.max_p_value}, which together "
                "promote a run that is significantly worse and refuse an equal one",
                setting="min_accuracy_gain",
                way_out=(
                    f"to accept a run that is worse by less than {-self.min_accuracy_gain}, leave max_p_value "
                    "at 1; to promote only a run that is significantly better, set min_accuracy_gain to 0 or more"
                ),
            )
        return self


MODEL_NAME = {"model_name": ("promote", "model_name")}


class RollbackConfig(FrozenConfig):
    """Rollback to the previous champion."""

    model_name: ModelName | None = Field(
        None, description="Name of the registered model; empty: the model of the table `images`"
    )
    version: int | None = Field(
        None,
        ge=1,
        description="Number of the version to roll back, so that a repeated run does not go back twice; empty: the "
        "champion",
    )
    reason: str = Field("", max_length=500, description="Why, for the log and the tag of the version")


class RollbackRun(SparkRun):
    """Parameters of the flow `rollback`."""

    first_screen = TABLES | {name: ("rollback", name) for name in ("model_name", "version", "reason")}

    rollback: RollbackConfig = RollbackConfig()
