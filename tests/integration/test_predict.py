"""Batch inference with a registered model on a real Spark."""

import pandas as pd
import pytest
from delta.tables import DeltaTable

from tasks import tracking
from tasks.config import EtlConfig, PromoteConfig, SparkConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.predict.model import ImageClassifier
from tasks.registry.promote import promote_best
from tests.integration.untrained import log_run, predict


@pytest.fixture
def run(storage, tmp_path):
    """Return an MLflow run with an untrained model and a test accuracy."""
    return log_run(storage, tmp_path, seed=1, accuracy=0.5)


def test_batch_predictions_are_the_models_own_and_a_second_run_predicts_nothing(spark, source, storage, run, tmp_path):
    """Spark adds nothing to the model and loses nothing of it."""
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    model, moved = promote_best([run], PromoteConfig(), storage)
    assert moved
    report = predict(storage)
    assert (report.predicted, report.errors, report.model) == (60, 0, model)
    rows = spark.read.format("delta").load(storage.table("predictions")).collect()
    contents = {
        row["sha256"]: row["content"] for row in spark.read.format("delta").load(storage.table("images")).collect()
    }
    direct = ImageClassifier.load(tmp_path / "classifier-1").predict([contents[row["sha256"]] for row in rows])
    assert [row["label"] for row in rows] == [found.label for found in direct]
    for row, found in zip(rows, direct, strict=True):
        assert row["probability"] == pytest.approx(found.probability, rel=1e-4)
    again = predict(storage)
    assert (again.predicted, again.predictions) == (0, report.predictions)


def test_the_pyfunc_gives_what_the_classifier_gives(storage, run, source, tmp_path):
    """One package for batch and serving."""
    model, _ = promote_best([run], PromoteConfig(), storage)
    package = tracking.load_package(tracking.download_model(storage, model, tmp_path / "package"))
    contents = [file.read_bytes() for file in sorted(source.glob("*/00*.png"))]
    frame = package.predict(pd.DataFrame({"content": [*contents, b"bad"]}))
    direct = ImageClassifier.load(tmp_path / "classifier-1").predict([*contents, b"bad"])
    assert frame["label"].tolist()[:-1] == [found.label for found in direct][:-1]
    assert frame["error"].tolist()[-1] == direct[-1].error
    assert "not_an_image" in frame["error"].tolist()[-1]


def test_a_row_that_cannot_be_decoded_gets_an_error_and_a_new_version_predicts_all_again(
    spark, source, storage, run, tmp_path
):
    """Never a failed job, never a silent drop."""
    rows = [("good", next(source.glob("red/*.png")).read_bytes()), ("bad", b"bad")]
    spark.createDataFrame(rows, "sha256 string, content binary").write.format("delta").save(storage.table("own"))
    promote_best([run], PromoteConfig(), storage)
    report = predict(storage, table=storage.table("own"))
    assert (report.predicted, report.errors) == (2, 1)
    better = log_run(storage, tmp_path, seed=2, accuracy=0.9)
    champion, moved = promote_best([run, better], PromoteConfig(), storage)
    assert moved
    assert champion.run_id == better.run_id
    report = predict(storage, table=storage.table("own"))
    assert (report.predicted, report.errors) == (2, 1)
    read = spark.read.format("delta").load(storage.table("predictions"))
    assert sorted((row["sha256"], row["model_version"]) for row in read.collect()) == [
        ("bad", 1),
        ("bad", 2),
        ("good", 1),
        ("good", 2),
    ]
    assert DeltaTable.forPath(spark, storage.table("predictions")).history(1).collect()[0]["version"] == 1


def test_what_is_missing_is_said(spark, source, storage, run):
    """No champion, no table, no column: one sentence each."""
    with pytest.raises(WrongInput, match="no version with the alias 'champion'"):
        predict(storage)
    promote_best([run], PromoteConfig(), storage)
    with pytest.raises(WrongInput, match="is not a Delta table"):
        predict(storage)
    spark.createDataFrame([("a",)], "sha256 string").write.format("delta").save(storage.table("images"))
    with pytest.raises(WrongInput, match="has no column content"):
        predict(storage)


def test_the_gate_keeps_the_champion_and_equal_runs_keep_the_first(storage, run, tmp_path):
    """A run below the gate changes nothing."""
    model, _ = promote_best([run], PromoteConfig(), storage)
    worse = log_run(storage, tmp_path, seed=3, accuracy=0.4)
    with pytest.raises(WrongInput, match="below promote.min_test_accuracy 0.95"):
        promote_best([worse], PromoteConfig(min_test_accuracy=0.95), storage)
    assert tracking.model_with_alias(storage, "lakevision", "champion") == model
    assert promote_best([run, worse], PromoteConfig(), storage) == (model, False)
    assert promote_best([], PromoteConfig(), storage) == (model, False)
