"""Batch inference on folders and URLs of images without a table, with a registered model on a real Spark."""

import hashlib
import os
import shutil
from collections import Counter
from pathlib import Path

import deltalake
import pandas as pd
import pyarrow as pa
import pytest

from tasks.checks.preflight import check_pipeline
from tasks.config.etl import EtlConfig
from tasks.config.pipeline import PipelineConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.extract import MAX_FILE_BYTES
from tasks.etl.ingest import ingest_images
from tasks.model_package.classifier import ImageClassifier
from tasks.predict import source_batch
from tasks.predict.answers import champion_answers
from tasks.registry.promote import promote_best
from tasks.tables.snapshots import latest
from tests.builders.delta_rows import data_files, delta_rows
from tests.builders.image_bytes import encoded, noise
from tests.builders.photo_folder import BROKEN, GOOD, PATHS, UNREADABLE, write_folder
from tests.builders.untrained_model import log_run, predict
from tests.conftest import write_images


def predict_files(source, storage, model_name="photos", **settings):
    """Run batch inference on files."""
    return predict(storage, model_name, source=str(source), **settings)


def answers_of(source, storage, model_name="photos"):
    """Return the champion's answers by path."""
    rows = champion_answers(storage.home, source=str(source), model_name=model_name).read_all().to_pylist()
    assert len({row["path"] for row in rows}) == len(rows)
    return {row["path"]: row for row in rows}


def promote(storage, tmp_path, name="photos", seed=1, accuracy=0.5):
    """Return the champion after a promotion of an untrained model."""
    run = log_run(storage, tmp_path, seed=seed, accuracy=accuracy)
    return promote_best([run], PromoteConfig(model_name=name), storage).champion


def predictions_of(storage):
    """Return the rows of the newest version of `predictions`."""
    return delta_rows(deltalake.DeltaTable(storage.table("predictions"))).to_pylist()


def versions(storage):
    """Return the versions of both tables."""
    return tuple(latest(None, storage.table(name)).version for name in ("predictions", "inputs"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder of images in no particular layout, with broken files of every kind."""
    return write_folder(tmp_path)


def test_every_file_of_a_folder_has_an_answer_and_only_changed_files_are_read_again(
    spark, folder, storage, tmp_path, monkeypatch, caplog, messages_of
):
    """Answers equal the classifier's. New, changed and deleted files are found, broken ones have a reason."""
    caplog.set_level("INFO", "lakevision.predict")
    model = promote(storage, tmp_path)
    report = predict_files(folder, storage)
    assert (report.predicted, report.errors, report.unreadable, report.model) == (9, 5, 2, model)
    parts = f"{len(GOOD) + 1} with an answer + 7 failed + 1 ignored (1 .txt) + 1 left by systems"
    assert f"'{folder}': {len(PATHS) + 2} files = {parts}" in messages_of("lakevision.predict")
    assert any(
        line.startswith("photos version 1, trained on images of '") and line.endswith(f"files of '{folder}'")
        for line in messages_of("lakevision.predict")
    )
    answers = answers_of(folder, storage)
    assert answers.keys() == PATHS
    classifier = ImageClassifier.load(tmp_path / "classifier-1")
    for path, row in answers.items():
        if path in UNREADABLE:
            assert (row["sha256"], row["predicted"], row["model_version"]) == (None, None, None)
            assert row["error"].startswith("unreadable: ")
            continue
        content = (folder / path).read_bytes()
        (direct,) = classifier.predict([content])
        assert (row["sha256"], row["model_version"]) == (hashlib.sha256(content).hexdigest(), 1)
        assert (row["predicted"], row["error"]) == (direct.label, direct.error)
        assert row["probability"] == (None if direct.error else pytest.approx(direct.probability, rel=1e-4))
    for path, (_, reason) in BROKEN.items():
        assert answers[path]["error"].startswith(reason)
    assert {image.path for image in report.least_confident if image.thumbnail} == GOOD.keys() - {
        "copies/one.png",
        "copies/'; two.png",
    }
    table = pd.read_csv(report.csv, keep_default_na=False).set_index("path")
    assert {path: row["error"] or None for path, row in answers.items()} == {
        path: error or None for path, error in table["error"].items()
    }
    assert {file.path: file.error for file in report.failed} == {
        path: row["error"] for path, row in answers.items() if row["error"]
    }
    assert Counter(row["sha256"] for row in predictions_of(storage)).most_common(1)[0][1] == 1
    assert all(row["content_sha256"] == row["sha256"] for row in predictions_of(storage))

    # Unreadable files are tried again by each run, and nothing is committed.
    assert (predict_files(folder, storage).predicted, versions(storage)) == (0, (0, 0))
    (folder / "bad" / "huge.jpg").unlink()
    os.unlink(os.fsencode(folder) + b"/bytes \xff.png")
    assert (predict_files(folder, storage).predicted, versions(storage)) == (0, (0, 1))

    # Without these, a run with nothing new needs neither Spark nor the model.
    monkeypatch.setattr(source_batch, "send_package", None)
    monkeypatch.setattr(source_batch, "read_files", None)
    report = predict_files(folder, storage)
    assert (report.predicted, versions(storage)) == (0, (0, 1))
    monkeypatch.undo()

    read = []
    read_files = source_batch.read_files

    def remove_then_read(spark, files, location):
        read.extend(files["path"].to_pylist())
        (folder / "soon gone.png").unlink(missing_ok=True)
        return read_files(spark, files, location)

    monkeypatch.setattr(source_batch, "read_files", remove_then_read)
    (folder / "new").mkdir()
    (folder / "new" / "one.png").write_bytes(encoded(noise(24, 24, seed=6)))
    (folder / "soon gone.png").write_bytes(encoded(noise(24, 24, seed=7)))
    (folder / "a.png").write_bytes(encoded(noise(24, 24, seed=8)))
    (folder / "link in.png").unlink()
    (folder / "bad" / "text.png").unlink()
    report = predict_files(folder, storage)
    assert sorted(read) == ["a.png", "new/one.png", "soon gone.png"]
    assert (report.predicted, report.errors, report.unreadable, versions(storage)) == (2, 0, 0, (1, 2))
    answers = answers_of(folder, storage)
    assert answers.keys() == (PATHS | {"new/one.png"}) - UNREADABLE - {"link in.png", "bad/text.png"}
    assert answers["a.png"]["sha256"] == hashlib.sha256((folder / "a.png").read_bytes()).hexdigest()
    assert answers["a.png"]["sha256"] != answers["copies/one.png"]["sha256"]

    # A touched file is read, and has its prediction; replaced in place, with its size and time, it gets another.
    os.utime(folder / "a.png", (1, 1))
    predict_files(folder, storage)
    before = {row["sha256"]: row["predicted_at"] for row in predictions_of(storage)}
    (folder / "a.png").chmod(0o600)
    (folder / "bad" / "empty.jpg").chmod(0o600)
    report = predict_files(folder, storage)
    assert (report.predicted, report.errors, report.unreadable) == (0, 0, 0)
    assert {row["sha256"]: row["predicted_at"] for row in predictions_of(storage)} == before
    content = bytearray((folder / "a.png").read_bytes())
    content[-1] ^= 1
    (folder / "a.png").write_bytes(content)
    os.utime(folder / "a.png", (1, 1))
    assert (predict_files(folder, storage).predicted, predict_files(folder, storage).predicted) == (1, 0)
    assert answers_of(folder, storage)["a.png"]["sha256"] == hashlib.sha256(content).hexdigest()

    # Errors are scored again on request; rows of other images stay as they are.
    before = {row["sha256"]: row["predicted_at"] for row in predictions_of(storage)}
    report = predict_files(folder, storage, retry_errors=True)
    assert (report.predicted, report.errors) == (4, 4)
    again = [row for row in predictions_of(storage) if row["predicted_at"] != before[row["sha256"]]]
    assert len(again) == 4
    assert all(row["error"] for row in again)


def test_killed_run_is_repaired_and_a_new_model_reads_all_files_again(spark, source, storage, tmp_path, monkeypatch):
    """Between the two commits nothing is lost: the next run commits the files, and predicts nothing twice.

    Nor are rows of files that are not there because a part of the source is not mounted.
    """
    promote(storage, tmp_path)
    record = source_batch.record_inputs
    monkeypatch.setattr(source_batch, "record_inputs", None)
    with pytest.raises(TypeError):
        predict_files(source, storage)
    assert latest(None, storage.table("predictions")).version == 0
    assert answers_of(source, storage) == {}
    monkeypatch.setattr(source_batch, "record_inputs", record)
    predict_files(source, storage)
    assert (len(predictions_of(storage)), len(answers_of(source, storage))) == (60, 60)

    promote(storage, tmp_path, seed=2, accuracy=0.9)
    assert {row["predicted"] for row in answers_of(source, storage).values()} == {None}
    assert predict_files(source, storage).predicted == 60
    assert {row["model_version"] for row in answers_of(source, storage).values()} == {2}
    assert versions(storage)[1] == 0  # the files are the same
    # The same file below another folder is a file of another source.
    assert predict_files(source / "red", storage).predicted == 20
    assert (len(predictions_of(storage)), len(answers_of(source / "red", storage))) == (120, 20)

    # Files with another path are not gone; many that are gone are a question, before anything is written.
    (source / "red").rename(source / "scarlet")
    assert predict_files(source, storage).predicted == 20
    (source / "scarlet").rename(tmp_path / "not mounted")
    write_images(source, per_class=1, first=100)
    before = versions(storage)
    with pytest.raises(WrongInput, match="^the table 'inputs' would lose 20 of 60 images"):
        predict_files(source, storage)
    assert (versions(storage), len(answers_of(source, storage))) == (before, 60)
    assert predict_files(source, storage, max_deleted_fraction=1).predicted == 3
    assert len(answers_of(source, storage)) == 43


def test_model_of_the_table_predicts_files_and_too_many_errors_write_nothing(spark, source, storage, tmp_path):
    """Without a name it is the model of `images`; the fraction counts files that cannot be read, too."""
    other = tmp_path / "other"
    shutil.copytree(source / "red", other)
    with pytest.raises(WrongInput, match="the table '.*/images'") as refused:
        predict_files(other, storage, None)
    assert refused.value.setting == "promote.model_name"
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    champion = promote_best([run], PromoteConfig(), storage).champion
    for number in range(8):
        (other / f"bad-{number}.png").write_bytes(b"bad %d" % number)
    for number in range(2):
        with (other / f"huge-{number}.png").open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(WrongInput, match="^10 of 30 images have an error") as refused:
        predict_files(other, storage, None, max_error_fraction=0.3)
    assert refused.value.setting == "predict.max_error_fraction"
    assert not Path(storage.table("predictions")).exists()
    assert not Path(storage.table("inputs")).exists()
    report = predict_files(other, storage, None)
    assert (report.predicted, report.errors, report.unreadable, report.model) == (28, 8, 2, champion)
    # The same images are in the table: they have their predictions.
    assert predict(storage).predicted == 40


def test_source_without_images_is_refused_before_spark_starts(storage, tmp_path, monkeypatch):
    """The error names the setting, and nothing is written."""
    (tmp_path / "file.png").touch()
    (tmp_path / "empty").mkdir()
    promote(storage, tmp_path)
    monkeypatch.setattr(source_batch, "try_without_spark", None)
    dag = PipelineConfig(predict=PredictConfig(source=str(tmp_path / "empty")))
    with pytest.raises(WrongInput, match="^predict.source is '.*/empty'"):
        check_pipeline(dag, storage)
    for source, sentence in (
        (tmp_path / "nowhere", "predict.source is '.*/nowhere', .* does not exist"),
        (tmp_path / "file.png", "predict.source is '.*/file.png', .* not a folder"),
        (tmp_path / "empty", "predict.source is '.*/empty', which holds no image"),
        ("s3a:photos", "predict.source is 's3a:photos', .* neither a path"),
    ):
        with pytest.raises(WrongInput, match=sentence):
            predict_files(source, storage)
    assert {path.name for path in Path(storage.tables).iterdir()} <= {"promotions", "promotions.lock"}


def test_pinned_version_of_a_table_is_predicted(spark, source, storage, tmp_path):
    """Images of later versions are not predicted; a version that is not there is named with those that are."""
    promote(storage, tmp_path)
    own = storage.table("own")
    rows = [{"sha256": str(number), "content": noise_png} for number, noise_png in enumerate(GOOD.values())]
    for row in rows[:3]:
        deltalake.write_deltalake(own, pa.Table.from_pylist([row]), mode="append")
    report = predict(storage, "photos", table=own, table_version=1)
    assert report.predicted == 2
    assert predict(storage, "photos", table=own, table_version=1).predictions == report.predictions
    assert predict(storage, "photos", table=own).predicted == 1
    with pytest.raises(WrongInput, match="table_version is 9, but '.*/own' .* 0 to 2"):
        predict(storage, "photos", table=own, table_version=9)
    deltalake.write_deltalake(own, pa.Table.from_pylist(rows[:1]), mode="overwrite")
    for file in {*Path(own).glob("*.parquet")} - {*data_files(own)}:
        file.unlink()
    with pytest.raises(WrongInput, match="^predict.table_version is 1, .* removed"):
        predict(storage, "photos", table=own, table_version=1)
