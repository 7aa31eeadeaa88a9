"""Streaming inference with a registered model on a real Spark: equal to batch, exactly once, and its ways out."""

import shutil
import signal
from pathlib import Path

import deltalake
import pytest
from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tasks.config.etl import EtlConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.registry.promote import promote_best
from tasks.stream import micro_batch
from tests.builders.image_bytes import png_header_only
from tests.builders.killed_streams import MODEL, kill_in_batch
from tests.builders.streams import append_images, create_images, photos_of, predicted, stream
from tests.builders.untrained_model import log_run, predict
from tests.conftest import write_images


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
    assert SparkSession.getActiveSession() is spark, "the session of a batch outlived the stream"
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

    # Some of the new images have a prediction by batch inference before the stream sees them.
    write_images(source, 1, first=20)
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    assert predict(storage).predicted == 3
    write_images(source, 2, first=20)
    (source / "red" / "000.png").unlink()
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    later = stream(storage)
    assert (later.predicted, later.versions_behind) == (3, 0)
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


def test_moved_alias_counts_from_the_next_batch_on(spark, source, storage, tmp_path, monkeypatch):
    """No batch mixes model versions, a model is sent once, and batch inference fills in those of the new version."""
    first = promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    create_images(spark, path, images[:8])
    for begin in (8, 16, 24):
        append_images(spark, path, images[begin : begin + 8])
    sent = []
    send_package, score = micro_batch.send_package, micro_batch.score

    def move_alias_during_the_first_batch(rows, model, settings):
        if len(sent) == 1:
            promote(storage, tmp_path, seed=2, model_name="photos")
        return score(rows, model, settings)

    monkeypatch.setattr(micro_batch, "send_package", lambda *given: sent.append(given[2]) or send_package(*given))
    monkeypatch.setattr(micro_batch, "score", move_alias_during_the_first_batch)

    report = stream(storage, "photos", table=path, max_files_per_batch=2)

    assert report.batches >= 3
    assert (report.predicted, report.model.version, report.versions_behind) == (32, 2, 0)
    assert sent == [first, report.model]
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    written = feed.load(storage.table("predictions")).groupBy("_commit_version")
    versions = written.agg(F.collect_set("model_version").alias("of")).orderBy("_commit_version").collect()
    assert [row["of"] for row in versions] == [[1]] + (report.batches - 1) * [[2]]
    by_first = [row for row in predicted(spark, storage.table("predictions")) if row[1] == 1]
    assert 0 < len(by_first) < 32
    assert predict(storage, "photos", table=path).predicted == len(by_first)
    assert predicted(spark, storage.table("predictions")) == sorted(
        [*by_first, *((name, 2) for name, _content, _label in images[:32])]
    )


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
    create_images(spark, path, [*images[:2], *broken[:6]])
    assert (few := stream(storage, "photos", table=path)).errors == 6
    assert few.predicted == 8

    append_images(spark, path, broken[6:])
    append_images(spark, path, images[2:4])
    for _attempt in range(2):
        with pytest.raises(WrongInput, match=r"18 of 20 images have an error .* predict.max_error_fraction 0.5"):
            stream(storage, "photos", table=path)
    assert predicted(spark, storage.table("predictions")) == sorted(
        (name, 1) for name, _content, _label in [*images[:2], *broken[:6]]
    )
    DeltaTable.forPath(spark, path).delete(F.col("sha256").isin([name for name, *_rest in broken[6:12]]))
    accepted = stream(storage, "photos", table=path, max_error_fraction=1.0)
    assert (accepted.predicted, accepted.errors, accepted.versions_behind) == (14, 12, 0)
    rows = spark.read.format("delta").load(storage.table("predictions")).collect()
    assert {row["sha256"] for row in rows if row["error"]} == {name for name, *_rest in [*broken[:6], *broken[12:]]}
    assert {row["sha256"] for row in rows if row["label"]} == {name for name, *_rest in images[:4]}


def test_deleted_changes_and_a_damaged_checkpoint_have_a_way_out(spark, source, storage, tmp_path):
    """A late stream says that its changes were deleted; a restart predicts only what has no prediction."""
    promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    create_images(spark, path, images[:2])
    table, predictions = DeltaTable.forPath(spark, path), storage.table("predictions")
    assert stream(storage, "photos", table=path).predicted == 2
    append_images(spark, path, images[2:4])
    table.update(set={"label": F.lit("red")})
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    table.vacuum(0)
    with pytest.raises(WrongInput, match=r"were deleted, by VACUUM .*: set stream.restart to true for one run"):
        stream(storage, "photos", table=path)
    report = stream(storage, "photos", table=path, restart=True)
    assert (report.predicted, report.versions_behind) == (2, 0)

    # The clean-up of the log removes old commits once a checkpoint of the log has them.
    append_images(spark, path, images[4:5])
    append_images(spark, path, images[5:6])
    spark.sql(f"OPTIMIZE delta.`{path}`")  # The only commit that stays changes no rows.
    delta_log = Path(path, "_delta_log")
    deltalake.DeltaTable(path).create_checkpoint()
    for file in sorted(delta_log.glob("*.json"))[:-1]:
        file.unlink()
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    with pytest.raises(WrongInput, match=r"or by the clean-up of the table's log: set stream.restart"):
        stream(storage, "photos", table=path)
    assert stream(storage, "photos", table=path, restart=True).predicted == 2
    assert stream(storage, "photos", table=path).batches == 0

    # Columns of other types: the older changes cannot be read as these.
    append_images(spark, path, images[6:7])
    other = spark.createDataFrame([(*images[7][:2], 5)], "sha256 string, content binary, label int")
    other.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(path)
    with pytest.raises(WrongInput, match=r"the columns of '.*' are others than in the changes .*: set stream.restart"):
        stream(storage, "photos", table=path)

    (checkpoint,) = Path(f"{predictions}.streams").glob("*/[0-9]*")
    ended = max(int(file.name) for file in checkpoint.glob("commits/[0-9]*"))
    offsets = checkpoint / "offsets" / str(ended)
    for damage, reason in ((lambda: offsets.write_text("v1\n{"), "cannot be read"), (offsets.unlink, "are missing")):
        damage()
        with pytest.raises(
            WrongInput, match=rf"the checkpoint '.*' of the stream is damaged \(.*{reason}\): set stream"
        ):
            stream(storage, "photos", table=path)
    assert stream(storage, "photos", table=path, restart=True).predicted == 1
    assert len(predicted(spark, predictions)) == 7

    # Another table at the same path, and other predictions: each is a stream of its own, which begins with all images.
    shutil.rmtree(path)
    create_images(spark, path, images[10:13])
    assert stream(storage, "photos", table=path).predicted == 3
    shutil.rmtree(predictions)
    assert stream(storage, "photos", table=path).predicted == 3


def test_input_that_a_stream_cannot_read_is_refused(spark, source, storage, tmp_path):
    """A missing table, champion, change data feed or column, and other predictions, each have one sentence."""
    images, path = photos_of(source), storage.table("own")
    with pytest.raises(WrongInput, match="is not a Delta table"):
        stream(storage)
    create_images(spark, path, images[:1])
    with pytest.raises(WrongInput, match="'photos' has no version with the alias 'champion'"):
        stream(storage, "photos", table=path)
    promote(storage, tmp_path, model_name="photos")
    frame = spark.createDataFrame([("a", b"1")], "sha256 string, content binary")
    frame.write.format("delta").save(storage.table("plain"))
    with pytest.raises(
        WrongInput, match=r"'.*/plain' has no change data feed.*ALTER TABLE .* or use the flow predict-b"
    ):
        stream(storage, "photos", table=storage.table("plain"))
    frame.drop("content").write.format("delta").save(storage.table("keys"))
    with pytest.raises(WrongInput, match="has no column content"):
        stream(storage, "photos", table=storage.table("keys"))
    with pytest.raises(WrongInput, match=r"a table that .*lacks model_name"):
        stream(storage, "photos", table=path, predictions=storage.table("plain"))
    append_images(spark, path, [(None, b"1", "red")])
    with pytest.raises(WrongInput, match="sha256 is null in 1 of 2 changed rows"):
        stream(storage, "photos", table=path)


def test_killed_stream_is_continued_without_a_loss(spark, source, storage, tmp_path):
    """Every image has one prediction after a SIGKILL in a batch, which leaves no process."""
    promote(storage, tmp_path, model_name=MODEL)
    images, path = photos_of(source), storage.table("own")
    create_images(spark, path, images[:6])
    for begin in range(6, 15, 3):
        append_images(spark, path, images[begin : begin + 3])

    was_running, killed = kill_in_batch(storage, path, seconds=0.2, least=2)
    assert was_running, killed.output
    assert (killed.returncode, killed.left_running) == (-signal.SIGKILL, [])

    report = stream(storage, MODEL, table=path)
    assert (report.predicted > 0, report.versions_behind) == (True, 0)
    names = sorted((name, 1) for name, _content, _label in images[:15])
    assert predicted(spark, storage.table("predictions")) == names
