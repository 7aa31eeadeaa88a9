"""Streaming inference with a registered model on a real Spark: equal to batch, each image once, broken ones bounded."""

import deltalake
import pyarrow as pa
import pytest
from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tests.builders.delta_rows import delta_rows
from tests.builders.image_bytes import png_header_only
from tests.builders.streams import commit_images, keys_of, photos_of, promote, stream
from tests.builders.untrained_model import predict
from tests.conftest import write_images


def rows_of(path) -> pa.Table:
    """Return all rows of a table."""
    return delta_rows(deltalake.DeltaTable(path))


def test_stream_equals_batch_and_continues_with_new_images(spark, source, storage, tmp_path):
    """The stream writes the rows of batch inference, and later runs predict what was added and nothing else."""
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    promote(storage, tmp_path)
    report = stream(storage)
    assert (report.predicted, report.errors, report.versions_behind) == (60, 0, 0)
    assert SparkSession.getActiveSession() is spark, "the session of a batch outlived the stream"
    batch = predict(storage, predictions=storage.table("by-batch"))
    assert batch.predicted == 60
    of_stream, of_batch = (
        rows_of(storage.table(name)).drop_columns("predicted_at").sort_by("sha256").to_pylist()
        for name in ("predictions", "by-batch")
    )
    assert of_stream == of_batch

    again = stream(storage)
    assert (again.batches, again.predictions) == (0, report.predictions)
    assert predict(storage).predicted == 0

    # Some of the new images have a prediction by batch inference before the stream sees them.
    write_images(source, 1, first=20)
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    assert predict(storage).predicted == 3
    write_images(source, 2, first=20)
    (source / "red" / "000.png").unlink()
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    later = stream(storage)
    assert (later.predicted, later.versions_behind) == (3, 0)
    assert len(keys_of(storage.table("predictions"))) == 66, "the prediction of a deleted image stays"


def test_last_change_of_an_image_decides(spark, source, storage, tmp_path):
    """In one batch of many changes: appended, updated, deleted, deleted and added again, repeated, and compacted."""
    promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    commit_images(path, images[:4])
    settings = {"table": path}
    assert stream(storage, "photos", **settings).predicted == 4
    table = f"delta.`{path}`"
    commit_images(path, images[4:10])
    names = [image[0] for image in images]
    DeltaTable.forPath(spark, path).delete(F.col("sha256").isin(names[4], names[5], names[0]))
    commit_images(path, [images[5]])
    DeltaTable.forPath(spark, path).update(F.col("sha256").isin(names[1], names[6]), {"label": F.lit("other")})
    commit_images(path, [images[7], images[7]])
    spark.sql(f"OPTIMIZE {table}")

    report = stream(storage, "photos", **settings)

    assert (report.predicted, report.batches, report.unlearned) == (5, 1, ("other",))
    expected = sorted((name, 1) for name in names[:4] + names[5:10])
    assert keys_of(storage.table("predictions")) == expected
    spark.sql(f"OPTIMIZE {table}")
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (extra INT)")
    nothing = stream(storage, "photos", **settings)
    assert (nothing.batches, nothing.predictions) == (0, report.predictions)


def test_broken_images_do_not_block_a_stream_for_ever(spark, source, storage, tmp_path):
    """Too many stop a batch until they are deleted or accepted; a few are rows with an error."""
    promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    whole = images[0][1]
    kinds = (
        b"",
        b"bad",
        whole[:100],
        whole[: len(whole) // 2],
        png_header_only(60_000, 60_000),
        b"<html></html>",
    )
    broken = [(f"broken-{number}", kinds[number % len(kinds)], "red") for number in range(24)]
    commit_images(path, [*images[:2], *broken[:6]])
    assert (few := stream(storage, "photos", table=path)).errors == 6
    assert few.predicted == 8

    commit_images(path, broken[6:])
    commit_images(path, images[2:4])
    for _attempt in range(2):
        with pytest.raises(WrongInput, match=r"18 of 20 .* predict.max_error_fraction 0.5"):
            stream(storage, "photos", table=path)
    assert keys_of(storage.table("predictions")) == sorted(
        (name, 1) for name, _content, _label in [*images[:2], *broken[:6]]
    )
    DeltaTable.forPath(spark, path).delete(F.col("sha256").isin([name for name, *_rest in broken[6:12]]))
    accepted = stream(storage, "photos", table=path, max_error_fraction=1.0)
    assert (accepted.predicted, accepted.errors, accepted.versions_behind) == (14, 12, 0)
    rows = rows_of(storage.table("predictions")).to_pylist()
    assert {row["sha256"] for row in rows if row["error"]} == {name for name, *_rest in [*broken[:6], *broken[12:]]}
    assert {row["sha256"] for row in rows if row["label"]} == {name for name, *_rest in images[:4]}
