"""Streaming inference with a registered model on a real Spark: after moved aliases, deleted changes and kills."""

import shutil
import signal
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from delta.tables import DeltaTable
from pyspark.sql import functions as F

from tasks.errors import WrongInput
from tasks.stream import predict as stream_predict
from tasks.stream import run as stream_run
from tasks.stream.checkpoint import RESTART
from tests.builders.killed_streams import MODEL, kill_in_batch
from tests.builders.streams import commit_images, keys_of, photos_of, promote, stream
from tests.builders.untrained_model import predict


def test_moved_alias_counts_from_the_next_batch_on(spark, source, storage, tmp_path, monkeypatch):
    """No batch mixes model versions, a model is sent once, and batch inference fills in those of the new version."""
    first = promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    commit_images(path, images[:8])
    for begin in (8, 16, 24):
        commit_images(path, images[begin : begin + 8])
    sent = []
    send_package, score = stream_run.send_package, stream_predict.score

    def move_alias_during_the_first_batch(rows, model, settings):
        if len(sent) == 1:
            promote(storage, tmp_path, seed=2, model_name="photos")
        return score(rows, model, settings)

    monkeypatch.setattr(stream_run, "send_package", lambda *given: sent.append(given[2]) or send_package(*given))
    monkeypatch.setattr(stream_predict, "score", move_alias_during_the_first_batch)

    report = stream(storage, "photos", table=path, max_files_per_batch=1)

    assert report.batches >= 3
    assert (report.predicted, report.model.version, report.versions_behind) == (32, 2, 0)
    assert sent == [first, report.model]
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    written = feed.load(storage.table("predictions")).groupBy("_commit_version")
    versions = written.agg(F.collect_set("model_version").alias("of")).orderBy("_commit_version").collect()
    assert [row["of"] for row in versions] == [[1]] + (report.batches - 1) * [[2]]
    by_first = [row for row in keys_of(storage.table("predictions")) if row[1] == 1]
    assert 0 < len(by_first) < 32
    assert predict(storage, "photos", table=path).predicted == len(by_first)
    assert keys_of(storage.table("predictions")) == sorted(
        [*by_first, *((name, 2) for name, _content, _label in images[:32])]
    )


def test_deleted_changes_and_a_damaged_checkpoint_have_a_way_out(spark, source, storage, tmp_path):
    """A late stream says that its changes were deleted; a restart predicts only what has no prediction."""
    promote(storage, tmp_path, model_name="photos")
    images, path = photos_of(source), storage.table("own")
    commit_images(path, images[:2])
    predictions = storage.table("predictions")
    assert stream(storage, "photos", table=path).predicted == 2
    commit_images(path, images[2:4])
    DeltaTable.forPath(spark, path).update(set={"label": F.lit("red")})
    deltalake.DeltaTable(path).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(WrongInput, match=f"changes of '{path}' .* VACUUM") as refused:
        stream(storage, "photos", table=path)
    assert refused.value.way_out == RESTART
    report = stream(storage, "photos", table=path, restart=True)
    assert (report.predicted, report.versions_behind) == (2, 0)

    # The clean-up of the log removes old commits once a checkpoint of the log has them.
    commit_images(path, images[4:5])
    commit_images(path, images[5:6])
    spark.sql(f"OPTIMIZE delta.`{path}`")  # The only commit that stays changes no rows.
    delta_log = Path(path, "_delta_log")
    deltalake.DeltaTable(path).create_checkpoint()
    for file in sorted(delta_log.glob("*.json"))[:-1]:
        file.unlink()
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    with pytest.raises(WrongInput, match=f"changes of '{path}' .* the table's log") as refused:
        stream(storage, "photos", table=path)
    assert refused.value.way_out == RESTART
    assert stream(storage, "photos", table=path, restart=True).predicted == 2
    assert stream(storage, "photos", table=path).batches == 0

    # Columns of other types: the older changes cannot be read as these.
    commit_images(path, images[6:7])
    other = pa.table({"sha256": [images[7][0]], "content": [images[7][1]], "label": pa.array([5], pa.int32())})
    deltalake.write_deltalake(path, other, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(WrongInput, match=f"the columns of '{path}' are others") as refused:
        stream(storage, "photos", table=path)
    assert refused.value.way_out == RESTART

    (checkpoint,) = Path(f"{predictions}.streams").glob("*/[0-9]*")
    ended = max(int(file.name) for file in checkpoint.glob("commits/[0-9]*"))
    offsets = checkpoint / "offsets" / str(ended)
    for damage, reason in ((lambda: offsets.write_text("v1\n{"), "cannot be read"), (offsets.unlink, "are missing")):
        damage()
        with pytest.raises(WrongInput, match=rf"the checkpoint '{checkpoint}' .* \(.*{reason}\)") as refused:
            stream(storage, "photos", table=path)
        assert refused.value.way_out == RESTART
    assert stream(storage, "photos", table=path, restart=True).predicted == 1
    assert len(keys_of(predictions)) == 7

    # Another table at the same path, and other predictions: each is a stream of its own, which begins with all images.
    shutil.rmtree(path)
    commit_images(path, images[10:13])
    assert stream(storage, "photos", table=path).predicted == 3
    shutil.rmtree(predictions)
    assert stream(storage, "photos", table=path).predicted == 3


def test_input_that_a_stream_cannot_read_is_refused(spark, source, storage, tmp_path):
    """A missing table, champion, change data feed or column, and other predictions, each have one sentence."""
    images, path = photos_of(source), storage.table("own")
    with pytest.raises(WrongInput, match="is not a Delta table"):
        stream(storage)
    commit_images(path, images[:1])
    with pytest.raises(WrongInput, match="'photos' has no version .* 'champion'"):
        stream(storage, "photos", table=path)
    promote(storage, tmp_path, model_name="photos")
    plain = pa.table({"sha256": ["a"], "content": [b"1"]})
    deltalake.write_deltalake(storage.table("plain"), plain)
    with pytest.raises(WrongInput, match=r"'.*/plain' has no change data feed") as refused:
        stream(storage, "photos", table=storage.table("plain"))
    assert "ALTER TABLE" in refused.value.way_out
    deltalake.write_deltalake(storage.table("keys"), plain.drop_columns("content"))
    with pytest.raises(WrongInput, match="has no column content"):
        stream(storage, "photos", table=storage.table("keys"))
    with pytest.raises(WrongInput, match=r"a table that .*lacks model_name"):
        stream(storage, "photos", table=path, predictions=storage.table("plain"))
    commit_images(path, [(None, b"1", "red")])
    with pytest.raises(WrongInput, match="sha256 is null in 1 of 2 changed rows"):
        stream(storage, "photos", table=path)


def test_killed_stream_is_continued_without_a_loss(spark, source, storage, tmp_path):
    """Every image has one prediction after a SIGKILL in a batch, which leaves no process."""
    promote(storage, tmp_path, model_name=MODEL)
    images, path = photos_of(source), storage.table("own")
    commit_images(path, images[:6])
    for begin in range(6, 15, 3):
        commit_images(path, images[begin : begin + 3])

    was_running, killed = kill_in_batch(storage, path, seconds=0.2, least=2)
    assert was_running, killed.output
    assert (killed.returncode, killed.left_running) == (-signal.SIGKILL, [])

    report = stream(storage, MODEL, table=path)
    assert (report.predicted > 0, report.versions_behind) == (True, 0)
    names = sorted((name, 1) for name, _content, _label in images[:15])
    assert keys_of(storage.table("predictions")) == names
