"""Streams of the tests, and what their tables hold."""

from pathlib import Path

import deltalake
import pyarrow as pa

from tasks.config.prediction import PredictConfig, StreamConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.refs import ModelRef, StreamReport
from tasks.registry.promote import promote_best
from tasks.storage import Storage
from tasks.stream.predict import predict_stream
from tasks.stream.run import ShowProgress
from tests.builders.delta_rows import delta_rows
from tests.builders.untrained_model import log_run

STREAM_SETTINGS = frozenset(StreamConfig.model_fields)

IMAGES = pa.schema([("sha256", pa.string()), ("content", pa.binary()), ("label", pa.string())])


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


def promote(storage: Storage, tmp_path: Path, seed: int = 1, model_name: str | None = None) -> ModelRef | None:
    """Return the champion after the promotion of a run that is better than those with a lower seed."""
    run = log_run(storage, tmp_path, seed=seed, accuracy=0.5 + seed / 100)
    return promote_best([run], PromoteConfig(model_name=model_name), storage).champion


def commit_images(path: str, rows: list[tuple[str | None, bytes, str]]) -> None:
    """Append images in one commit and one file, without Spark; create the table if it is missing.

    A commit by Spark costs a second of CPU time.
    """
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), IMAGES, strict=True)]
    feed = {"delta.enableChangeDataFeed": "true"}
    deltalake.write_deltalake(path, pa.table(columns, schema=IMAGES), mode="append", configuration=feed)


def photos_of(source: Path) -> list[tuple[str, bytes, str]]:
    """Return the images of a source by name, with their labels."""
    return [
        (f"{file.parent.name}-{file.stem}", file.read_bytes(), file.parent.name)
        for file in sorted(source.glob("*/*.png"))
    ]


def keys_of(path: str) -> list[tuple[str, int]]:
    """Return sha256 and model version of all predictions, sorted."""
    rows = delta_rows(deltalake.DeltaTable(path), "sha256", "model_version").to_pylist()
    return sorted((row["sha256"], row["model_version"]) for row in rows)
