"""Streaming inference with a registered model on a real Spark: equal to batch, exactly once, and its ways out."""

import pytest
from delta.tables import DeltaTable
from pyspark.sql import functions as F

from tasks.config.etl import EtlConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.etl.ingest import ingest_images
from tasks.registry.promote import promote_best
from tests.builders.streams import append_images, create_images, photos_of, predicted, stream
from tests.builders.untrained_model import log_run, predict
from tests.conftest import write_images

pytestmark = pytest.mark.usefixtures("quick_trial")


def promote(storage, tmp_path, seed=1, model_name=None):
    """Return the champion after the promotion of a run that is better than those with a lower seed."""
    run = log_run(storage, tmp_path, seed=seed, accuracy=0.5 + seed / 100)
    return promote_best([run], PromoteConfig(model_name=model_name), storage).champion


def test_stream_equals_batch_and_continues_with_new_images(spark, source, storage, tmp_path):
    """The stream writes the rows of batch inference, and later runs predict what was added and nothing else."""
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    promote(storage, tmp_path)
    report = stream(storage)
    assert (report.predicted, report.errors, report.versions_behind) == (60, 0, 0)
    batch = predict(storage, predictions=storage.table("by-batch"))
    assert batch.predicted == 60
    of_stream, of_batch = (
        spark.read.format("delta").load(storage.table(name)).drop("predicted_at").orderBy("sha256").collect()
        for name in ("predictions", "by-batch")
    )
    assert of_stream == of_batch

    again = stream(storage)
    assert (again.batches, again.predictions) == (0, report.predictions)
    assert predict(storage).predicted == 0

    write_images(source, 2, first=20)
    (source / "red" / "000.png").unlink()
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    # Some of the new images have a prediction by batch inference before the stream sees them.
    later = stream(storage)
    assert (later.predicted, later.versions_behind) == (6, 0)
    assert len(predicted(spark, storage.table("predictions"))) == 66, "the prediction of a deleted image stays"


def test_last_change_of_an_image_decides(spark, source, storage, tmp_path):
    """In one batch of many changes: appended, updated, deleted, deleted and added again, repeated, and compacted."""
    promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    create_images(spark, path, images[:4])
    settings = {"table": path}
    assert stream(storage, "photos", **settings).predicted == 4
    table = f"delta.`{path}`"
    append_images(spark, path, images[4:10])
    names = [image[0] for image in images]
    DeltaTable.forPath(spark, path).delete(F.col("sha256").isin(names[4], names[5], names[0]))
    append_images(spark, path, [images[5]])
    DeltaTable.forPath(spark, path).update(F.col("sha256").isin(names[1], names[6]), {"label": F.lit("other")})
    append_images(spark, path, [images[7], images[7]])
    spark.sql(f"OPTIMIZE {table}")

    report = stream(storage, "photos", **settings)

    assert (report.predicted, report.batches, report.unlearned) == (5, 1, ("other",))
    expected = sorted((name, 1) for name in names[:4] + names[5:10])
    assert predicted(spark, storage.table("predictions")) == expected
    spark.sql(f"OPTIMIZE {table}")
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (extra INT)")
    nothing = stream(storage, "photos", **settings)
    assert (nothing.batches, nothing.predictions) == (0, report.predictions)
