"""Parameters of streaming inference."""

from typing import Self

from pydantic import Field, model_validator

from tasks.config.frozen import FrozenConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import StageTimeout
from tasks.errors import loggable


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
        1000, ge=1, le=1_000_000, description="Maximum number of data files whose images one batch reads"
    )
    max_megabytes_per_batch: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="Size of the data files from which on a batch is full, in megabytes (10^6 bytes); a batch has at "
        "least one file",
    )
    restart: bool = Field(
        False,
        description="Start again from the newest version of the table, such as after VACUUM deleted changes that the "
        "stream had not read; images that have a prediction are not predicted again",
    )
    timeout_seconds: StageTimeout = Field(
        86_400,
        description="Timeout of a run, in seconds; it is retried twice, each time with this timeout. A stream with "
        "interval_seconds needs a longer one",
    )


class StreamRun(SparkRun):
    """Parameters of the flow `predict-stream`."""

    first_screen = (
        TABLES | MODEL_NAME | {"alias": ("predict", "alias"), "interval_seconds": ("stream", "interval_seconds")}
    )

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table"
    )
    predict: PredictConfig = PredictConfig()
    stream: StreamConfig = StreamConfig()

    @model_validator(mode="after")
    def _check_newest_version_of_a_table(self) -> Self:
        for name in ("source", "table_version"):
            if (value := getattr(self.predict, name)) not in {None, ""}:
                raise ValueError(
                    f"predict.{name} is '{loggable(value)}', but a stream reads a table's changes: leave it out, or "
                    "run the flow predict-batch"
                )
        return self
