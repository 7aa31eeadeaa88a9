"""Parameters of the promotion to champion."""

from typing import Literal

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.values import YEAR_SECONDS, ModelName, StageTimeout


class PromoteConfig(FrozenConfig):
    """Selection of the champion among training runs."""

    model_name: ModelName | None = Field(
        None,
        description="Name of the registered model; empty: one model per table, named after the source, such as "
        "lakevision-digits or lakevision-photos-1a2b3c",
    )
    min_test_accuracy: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Minimum accuracy on the split `test` for promotion; a run that is not better than the champion is "
        "never promoted",
    )
    min_test_macro_f1: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Minimum macro F1 on the split `test` for promotion: the mean F1 of all classes, to which a rare "
        "class contributes as much as a frequent one",
    )
    min_accuracy_gain: float = Field(
        0.0,
        ge=-1.0,
        le=1.0,
        description="The accuracy must exceed the champion's on the same images by more than this; negative to accept "
        "a run that is worse by less",
    )
    max_recall_drop: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="Maximum drop of the recall of a class against the champion's; 1: no limit",
    )
    min_class_images: int = Field(
        20, ge=1, description="Test images of a class from which on max_recall_drop counts: few images prove no drop"
    )
    max_p_value: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="Maximum p-value of McNemar's exact test of both models on the same images, such as 0.05; 1: no "
        "limit",
    )
    max_latency_ratio: float | None = Field(
        None,
        gt=0.0,
        description="Maximum time for one image relative to the champion's, measured in this process; empty: no limit",
    )
    max_megabytes: float | None = Field(
        None, gt=0.0, description="Maximum size of the weights, in megabytes (10^6 bytes); empty: no limit"
    )
    approval: Literal["auto", "human"] = Field(
        "auto",
        description="Who decides on a run that is within all limits; human: a run of the deployment promote asks "
        "in the UI, and no process waits meanwhile",
    )
    approval_seconds: int = Field(
        86_400,
        ge=1,
        le=YEAR_SECONDS,
        description="Time limit of the answer, in seconds; after it the run fails and the champion stays",
    )
    timeout_seconds: StageTimeout = Field(
        86_400, description="Timeout of the promotion, in seconds; it is retried twice, each time with this timeout"
    )


MODEL_NAME = {"model_name": ("promote", "model_name")}
