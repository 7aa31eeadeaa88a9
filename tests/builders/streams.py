"""Streams of the tests, and what their tables hold."""

from pathlib import Path

from pyspark.sql import SparkSession

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.config.stream import StreamConfig
from tasks.refs import StreamReport
from tasks.storage import Storage
from tasks.stream.counts import ShowProgress
from tasks.stream.predict import predict_stream

STREAM_SETTINGS = frozenset(StreamConfig.model_fields)


def stream(
    storage: Storage, model_name: str | None = None, show: ShowProgress | None = None, **settings
) -> StreamReport:
    """Run streaming inference with settings of the stream and of inference."""
    of_stream = {name: value for name, value in settings.items() if name in STREAM_SETTINGS}
    of_predict = {name: value for name, value in settings.items() if name not in STREAM_SETTINGS}
    return predict_stream(
        StreamConfig(**of_stream),
        PredictConfig(batch_size=8, **of_predict),
        PromoteConfig(model_name=model_name),
        storage,
        SparkConfig(driver_memory="1g"),
        show,
    )


def create_images(spark: SparkSession, path: str, rows: list[tuple[str, bytes, str]]) -> None:
    """Create a table of images with a change data feed, of sha256, content and label."""
    frame = spark.createDataFrame(rows, "sha256 string, content binary, label string")
    frame.write.format("delta").option("delta.enableChangeDataFeed", "true").save(path)


def append_images(spark: SparkSession, path: str, rows: list[tuple[str, bytes, str]]) -> None:
    """Append images in one commit."""
    spark.createDataFrame(rows, "sha256 string, content binary, label string").write.format("delta").mode(
        "append"
    ).save(path)


def photos_of(source: Path) -> list[tuple[str, bytes, str]]:
    """Return the images of a source by name, with their labels."""
    return [
        (f"{file.parent.name}-{file.stem}", file.read_bytes(), file.parent.name)
        for file in sorted(source.glob("*/*.png"))
    ]


def predicted(spark: SparkSession, path: str) -> list[tuple[str, int]]:
    """Return sha256 and model version of all predictions, sorted."""
    rows = spark.read.format("delta").load(path).select("sha256", "model_version").collect()
    return sorted((row["sha256"], row["model_version"]) for row in rows)
