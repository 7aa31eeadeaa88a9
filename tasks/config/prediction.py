"""Parameters of batch inference."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from tasks.config.form import Schema, when_given
from tasks.config.frozen import FrozenConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import DeletedFraction, StageTimeout, TableVersion
from tasks.credentials import Url
from tasks.errors import loggable

NO_TABLE: Schema = {"table": {"enum": [None, ""]}, "table_version": {"enum": [None]}}
"""Condition of a form that no table is given."""


class PredictConfig(FrozenConfig):
    """Batch inference with the champion."""

    rules: ClassVar[tuple[Schema, ...]] = (when_given("source", {"properties": NO_TABLE}),)

    table: Url | None = Field(
        None,
        description="Delta table with the columns sha256 and content, which may hold images that the model was not "
        "trained on; empty: the table `images`",
    )
    table_version: TableVersion | None = Field(None, description="Version of the table to predict; empty: the newest")
    source: Url | None = Field(
        None,
        description="Folder of jpg, jpeg or png files in any layout (a path or URL), to predict instead of a table; "
        "the table `inputs` beside the predictions has their paths",
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
    max_deleted_fraction: DeletedFraction = Field(
        0.2,
        description="Maximum fraction of the images of source that may leave the table `inputs` in a run since their "
        "files are gone. Five may leave in any case. Above it the run fails and writes nothing. 1: no maximum. A "
        "stream removes no rows",
    )
    retry_errors: bool = Field(
        False, description="Predict images with an error again, and replace their rows; otherwise they keep the error"
    )
    timeout_seconds: StageTimeout = Field(
        86_400, description="Timeout of inference, in seconds; it is retried twice, each time with this timeout"
    )

    @model_validator(mode="after")
    def _check_one_input(self) -> Self:
        given = {"table": self.table or None, "table_version": self.table_version}
        for name, value in given.items():
            if self.source and value is not None:
                raise ValueError(
                    f"source is '{loggable(self.source)}' and {name} is '{loggable(value)}', but files and a table are "
                    f"predicted by different runs: leave out source or {name}"
                )
        return self


class PredictRun(SparkRun):
    """Parameters of the flow `predict-batch`."""

    first_screen = (
        TABLES | MODEL_NAME | {name: ("predict", name) for name in ("alias", "table", "source", "predictions")}
    )

    rules: ClassVar[tuple[Schema, ...]] = (
        when_given("source", {"properties": NO_TABLE | {"predict": {"properties": NO_TABLE}}}),
    )

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table `images`"
    )
    predict: PredictConfig = PredictConfig()
