"""Parameters of inference in batches and as a stream, and of the flow `promote`, whose gate predicts test images."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tasks.config.frozen import AsBefore, FrozenConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import Fraction, RunId, Seconds, TableVersion
from tasks.credentials import Url
from tasks.errors import WrongInput, loggable


class PredictConfig(FrozenConfig):
    """Batch inference with the champion."""

    table: Url | None = Field(
        None,
        description="Delta table with the columns sha256 and content, which may hold images that the model was not "
        "trained on; empty: the table `images`",
    )
    table_version: TableVersion | None = Field(None, description="Version of the table to predict; empty: the newest")
    source: Url | None = Field(
        None,
        description="Folder of images in any layout (a path or URL), to predict instead of a table; "
        "the table `inputs` beside the predictions has their paths",
    )
    predictions: Url | None = Field(
        None, description="Delta table to write; empty: `predictions` beside the table `images`"
    )
    csv: Url | None = Field(
        None,
        description="CSV file with the answer for each file, replaced by each run; empty: predictions.csv in the home, "
        "or predictions-NAME.csv for tables in a folder NAME. A name without a slash is a file in the home",
    )
    alias: str = Field(
        "champion", pattern=r"^[a-zA-Z_-]+$", description="Alias of the registered model version to predict with"
    )
    batch_size: int = Field(64, ge=1, le=4096, description="Images per forward pass")
    top_k: int = Field(5, ge=1, le=1000, description="Number of most probable classes to write for each image")
    min_probability: Fraction = Field(
        0.0,
        description="Probability of the most probable class below which the label is 'unsure'; existing predictions "
        "keep their labels",
    )
    unknown_rate: Annotated[float, AsBefore(0.0)] = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="Fraction of images of the model's classes that may get the label 'unknown', from 0.001 to 0.5. "
        "Images with an unknown_score above the model's threshold for it get this label, also if they were 'unsure'. "
        "0: no such label; existing predictions keep their labels",
    )
    max_error_fraction: Fraction = Field(
        0.5,
        description="Maximum fraction of images with an error instead of a label; above it, from 10 errors on, the run "
        "fails and writes nothing",
    )
    max_deleted_fraction: Fraction = Field(
        0.2,
        description="Maximum fraction of the images of source that may leave the table `inputs` in a run since their "
        "files are gone. Five may leave in any case. Above it the run fails and writes nothing. 1: no maximum. A "
        "stream removes no rows",
    )
    retry_errors: bool = Field(
        False, description="Predict images with an error again, and replace their rows; otherwise they keep the error"
    )
    timeout_seconds: Seconds = Field(
        86_400, description="Timeout of inference, in seconds, for one attempt; a longer attempt is not retried"
    )

    @model_validator(mode="after")
    def _check_one_input(self) -> Self:
        given = {"table": self.table or None, "table_version": self.table_version}
        for name, value in given.items():
            if self.source and value is not None:
                raise WrongInput(
                    f"source is '{loggable(self.source)}' and {name} is '{loggable(value)}', but files and a table are "
                    "predicted by different runs",
                    setting="source",
                    way_out=f"leave out source or {name}",
                )
        return self


class PredictRun(SparkRun):
    """Parameters of the flow `predict-batch`."""

    first_screen = (
        TABLES | MODEL_NAME | {name: ("predict", name) for name in ("alias", "table", "source", "predictions", "csv")}
    )

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table `images`"
    )
    predict: PredictConfig = PredictConfig()


class PromoteRun(SparkRun):
    """Parameters of the flow `promote`."""

    first_screen = TABLES | MODEL_NAME | {"min_test_accuracy": ("promote", "min_test_accuracy")}

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
            raise WrongInput(
                f"reason is given, but run_ids has {len(self.run_ids)} runs",
                setting="reason",
                way_out="give the one run that it is about, or leave reason empty",
            )
        return self


class StreamConfig(FrozenConfig):
    """Source, batches and trigger of the stream."""

    interval_seconds: int | None = Field(
        None,
        ge=1,
        le=86_400,
        description="Interval of the batches of a stream that runs until it is cancelled, in seconds; empty: the run "
        "ends when it has processed what was there at its start",
    )
    max_files_per_batch: int = Field(
        1000,
        ge=1,
        le=1_000_000,
        description="Maximum number of files of a batch: of image files for predict.source, of the table's data files "
        "otherwise",
    )
    max_megabytes_per_batch: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="Size of these files from which on a batch is full, in megabytes (10^6 bytes); a batch has at "
        "least one file",
    )
    restart: bool = Field(
        False,
        description="Start again with the present rows or files, such as after VACUUM deleted changes that the stream "
        "had not read; images that have a prediction are not predicted again",
    )
    timeout_seconds: Seconds = Field(
        86_400,
        description="Timeout of a run, in seconds, for one attempt; a longer attempt is not retried. A stream with "
        "interval_seconds needs a longer one",
    )


class StreamRun(SparkRun):
    """Parameters of the flow `predict-stream`."""

    first_screen = (
        TABLES
        | MODEL_NAME
        | {name: ("predict", name) for name in ("alias", "source", "csv")}
        | {"interval_seconds": ("stream", "interval_seconds")}
    )

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table"
    )
    predict: PredictConfig = PredictConfig()
    stream: StreamConfig = StreamConfig()

    @model_validator(mode="after")
    def _check_newest_version(self) -> Self:
        if (version := self.predict.table_version) is not None:
            raise WrongInput(
                f"predict.table_version is {version}, but a stream reads the changes of a table",
                setting="predict.table_version",
                way_out="leave it out, or run the flow predict-batch",
            )
        return self
