"""Parameters of streaming inference."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from tasks.config.form import Schema, when_given
from tasks.config.frozen import FrozenConfig
from tasks.config.prediction import NO_TABLE, PredictConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import StageTimeout


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
    timeout_seconds: StageTimeout = Field(
        86_400,
        description="Timeout of a run, in seconds; it is retried twice, each time with this timeout. A stream with "
        "interval_seconds needs a longer one",
    )


class StreamRun(SparkRun):
    """Parameters of the flow `predict-stream`."""

    first_screen = (
        TABLES
        | MODEL_NAME
        | {name: ("predict", name) for name in ("alias", "source")}
        | {"interval_seconds": ("stream", "interval_seconds")}
    )

    rules: ClassVar[tuple[Schema, ...]] = (when_given("source", {"properties": {"predict": {"properties": NO_TABLE}}}),)

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table"
    )
    predict: PredictConfig = PredictConfig()
    stream: StreamConfig = StreamConfig()

    @model_validator(mode="after")
    def _check_newest_version(self) -> Self:
        if (version := self.predict.table_version) is not None:
            raise ValueError(
                f"predict.table_version is {version}, but a stream reads the changes of a table: leave it out, or run "
                "the flow predict-batch"
            )
        return self
