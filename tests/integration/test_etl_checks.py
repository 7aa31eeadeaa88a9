"""Data validation on Delta tables, logged to a tracking database."""

import shutil

import mlflow
import pytest
from PIL import Image

from tasks.config.etl import EtlConfig
from tasks.config.storage import SparkConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.etl.validate import measure_tables, validate_tables
from tasks.tracking.server import prepare_data_tracking, prepare_tracking
from tests.conftest import write_images


def test_checks_of_a_table_are_measured_and_logged_once_per_version(spark, tmp_path, storage):
    """The checks have counts, sizes, bad files, duplicates, and both files of a near-duplicate."""
    source = tmp_path / "source"
    for number, split in enumerate(("train", "val", "test")):
        write_images(source / split, per_class=3, first=10 * number)
    write_images(source / "train", per_class=1, side=40, first=50)
    (source / "val" / "red" / "bad.jpg").write_bytes(b"bad")
    shutil.copy(source / "train" / "red" / "000.png", source / "train" / "red" / "copy.png")
    ramp = Image.linear_gradient("L")
    ramp.save(source / "train" / "red" / "ramp.png")
    ramp.resize((128, 128)).save(source / "test" / "blue" / "ramp.jpg", quality=90)
    etl = EtlConfig(source=str(source), split_by="folder", near_duplicate_bits=0)
    report = ingest_images(etl, storage, SparkConfig())

    checks = validate_tables(report, etl, storage, SparkConfig(), {"why": "test"})

    assert checks.class_sizes == {"blue": 11, "green": 10, "red": 11}
    assert checks.imbalance_ratio == pytest.approx(1.1)
    assert checks.outcomes == {"stored": 32, "duplicate": 1, "quarantined": 1}
    assert checks.reasons == {"not_an_image": 1}
    assert [(file.path, file.reason) for file in checks.quarantined] == [("val/red/bad.jpg", "not_an_image")]
    assert checks.quarantined_fraction == pytest.approx(1 / 34)
    assert checks.widths == {"min": 24, "5%": 24, "median": 24, "95%": 128, "max": 256}
    assert (checks.leaked, checks.near_duplicates, checks.near_duplicates_complete) == (0, 1, True)
    pair = checks.nearest[0]
    assert {(pair.path, pair.label, pair.split), (pair.other_path, pair.other_label, pair.other_split)} == {
        ("train/red/ramp.png", "red", "train"),
        ("test/blue/ramp.jpg", "blue", "test"),
    }
    assert pair.bits == 0
    experiment = prepare_data_tracking(storage)
    client = mlflow.MlflowClient(storage.tracking)
    assert client.search_runs([prepare_tracking(storage)]) == []  # the experiment of training runs
    (run,) = client.search_runs([experiment])
    assert run.info.run_name == "data-validation v0"
    assert run.data.tags["why"] == "test"
    assert run.data.tags["lakevision.table_version"] == "0"
    assert run.data.metrics["near_duplicates"] == 1
    logged = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert logged == {"checks.json", "near_duplicates.json", "quarantined.json", "data_validation.json"}

    again = ingest_images(etl, storage, SparkConfig())
    assert again.changed is False
    assert validate_tables(again, etl, storage, SparkConfig(), {}) == checks
    assert len(client.search_runs([experiment])) == 1
    (source / "val" / "red" / "bad.jpg").unlink()
    repaired = validate_tables(ingest_images(etl, storage, SparkConfig()), etl, storage, SparkConfig(), {})
    assert repaired.reasons == {}
    assert len(client.search_runs([experiment])) == 2


def test_content_in_two_splits_is_refused(spark, source, storage):
    """ETL never writes such rows: another program changed the table, and accuracies on it are invalid."""
    etl = EtlConfig(source=str(source))
    report = ingest_images(etl, storage, SparkConfig())
    rows = spark.read.format("delta").load(report.images.path)
    rows.selectExpr("* EXCEPT (split)", "'other' AS split").limit(1).select(rows.columns).write.format("delta").mode(
        "append"
    ).save(report.images.path)
    changed = report.model_copy(update={"images": report.images.model_copy(update={"version": 1})})
    with pytest.raises(WrongInput, match=r"1 images of '.*' version 1 are in more") as refused:
        measure_tables(None, changed, etl, storage)
    assert refused.value.setting == "storage.tables"
