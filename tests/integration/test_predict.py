"""Batch inference with a registered model on a real Spark."""

import hashlib
import re
import shutil
import time
from collections import Counter

import deltalake
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from tasks.cache.materialize import materialize_cache
from tasks.config.cache import CacheConfig
from tasks.config.etl import EtlConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import WrongInput
from tasks.etl.ingest import ingest_images
from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.description import RATES
from tasks.predict import batch, scoring
from tasks.predict.answers import champion_answers
from tasks.predict.batch import predict_batch
from tasks.progress.count import listener
from tasks.registry.aliases import CHAMPION
from tasks.registry.promote import promote_best
from tasks.schema import ADDED_TO_PREDICTIONS, PREDICTIONS
from tasks.spark import worker_log
from tasks.storage import resolve_storage
from tasks.tables.delta import with_schema
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking.models import register_run, set_alias
from tests.builders.delta_rows import delta_rows
from tests.builders.streams import commit_images, keys_of
from tests.builders.untrained_model import log_run, predict
from tests.conftest import write_images


def ingest(source, storage):
    """Run ETL."""
    return ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, spark) -> str:
    """Return the folder of the tables that ETL made of 60 images."""
    folder = tmp_path_factory.mktemp("prepared")
    storage = resolve_storage(StorageConfig(home=str(folder / "home")))
    write_images(folder / "source", 20)
    ingest(folder / "source", storage)
    return storage.tables


def rows_of(path) -> list[dict]:
    """Return the rows of a table."""
    return delta_rows(deltalake.DeltaTable(path)).to_pylist()


def promote(runs, storage, model_name=None):
    """Return the champion after a promotion."""
    return promote_best(runs, PromoteConfig(model_name=model_name), storage).champion


def note_ended_tasks(monkeypatch) -> list[tuple[str, str, int]]:
    """Return a list that gets step, partition and number of images of each task, as its accumulator gets them."""
    ended = []

    def add(_self, *parts):
        for part in parts:
            ended.extend(part)
        return ()

    monkeypatch.setattr(worker_log.EndedTasks, "addInPlace", add)
    return ended


def test_workers_count_the_images_of_etl_cache_and_inference(spark, source, storage, tmp_path, monkeypatch):
    """Counts of workers arrive at the driver, and each step ends with the count of all images."""
    counts, ended, heard = [], note_ended_tasks(monkeypatch), []
    monkeypatch.setattr(worker_log, "advance", lambda *count: counts.append(count))
    with listener(heard.append):
        images = ingest(source, storage).images
        materialize_cache(CacheConfig(image_size=16), images, storage, SparkConfig())
        promote([log_run(storage, tmp_path, seed=1, accuracy=0.5)], storage)
        predict(storage)
    assert [(progress.step, progress.done, progress.total) for progress in heard] == [
        (step, done, 60) for step in ("etl", "cache", "predict") for done in (0, 60)
    ]
    # Spark reports ended tasks wherever they ran: all counts arrive before the step ends.
    for step in ("etl", "cache", "predict"):
        assert sum({part: done for name, part, done in ended if name == step}.values()) == 60, ended
    deadline = time.monotonic() + 30
    while {step for step, _part, _done in counts} != {"etl", "cache", "predict"}:
        assert time.monotonic() < deadline, counts
        time.sleep(0.1)
    assert all(1 <= done <= 60 for _step, _part, done in counts)


def test_batch_predictions_equal_direct_ones_and_a_second_run_predicts_nothing(
    spark, source, storage, tmp_path, monkeypatch
):
    """Predictions in Spark equal those of the classifier; the least certain images are listed by file."""
    temporary = tmp_path / "a b=ü#?%20"  # as in a home with such a name
    temporary.mkdir()
    monkeypatch.setattr(spark.sparkContext, "_temp_dir", str(temporary))
    monkeypatch.setattr(scoring, "is_in_driver", lambda _master: False)  # The model is sent as an archive.
    monkeypatch.setattr(batch, "start_workers", lambda _spark: None)  # A task that runs now would unpack it, too.
    first = min(source.glob("*/*.png"))
    shutil.copy(first, first.with_name("copy.png"))
    ingest(source, storage)
    model = promote([log_run(storage, tmp_path, seed=1, accuracy=0.5)], storage)
    assert model.name == "lakevision-source"
    report = predict(storage)
    assert (report.predicted, report.errors, report.model) == (60, 0, model)
    shown = report.least_confident
    assert len(shown) == 20
    for image in shown:
        (direct,) = ImageClassifier.load(tmp_path / "classifier-1").predict([(source / image.path).read_bytes()])
        assert (image.label, image.thumbnail[:22]) == (direct.label, "data:image/jpeg;base64")
        assert image.probability == pytest.approx(direct.probability, rel=1e-4)
    rows = rows_of(storage.table("predictions"))
    contents = {row["sha256"]: row["content"] for row in rows_of(storage.table("images"))}
    direct = ImageClassifier.load(tmp_path / "classifier-1").predict([contents[row["sha256"]] for row in rows])
    assert [row["label"] for row in rows] == [found.label for found in direct]
    for row, found in zip(rows, direct, strict=True):
        assert row["probability"] == pytest.approx(found.probability, rel=1e-4)
    assert shown[0].probability == min(row["probability"] for row in rows)
    again = predict(storage)
    assert (again.predicted, again.predictions, again.least_confident) == (0, report.predictions, shown)
    assert (again.csv, again.num_files, again.num_failed) == (f"{storage.home}/predictions.csv", 61, 0)
    check_answers(storage, source, {row["sha256"]: (row["label"], row["probability"]) for row in rows})
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    assert feed.load(storage.table("predictions")).count() == 60


def check_answers(storage, source, predicted):
    """Check that each file has the answer for its content, and that an image without a prediction has none."""
    answers = champion_answers(storage.home).read_all().to_pylist()
    files = {str(file.relative_to(source)): file for file in source.glob("*/*.png")}
    assert sorted(row["path"] for row in answers) == sorted(files)
    assert len(answers) == 61
    for row in answers:
        file = files[row["path"]]
        assert row["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert (row["label"], row["error"], row["model_version"]) == (file.parent.name, None, 1)
        assert (row["predicted"], row["probability"]) == predicted[row["sha256"]]
    unpredicted = champion_answers(storage.home, predictions=f"{storage.home}/nothing").read_all().to_pylist()
    assert {(row["predicted"], row["model_version"]) for row in unpredicted} == {(None, None)}


@pytest.mark.long
def test_table_of_release_0_1_gets_the_new_columns(spark, prepared, storage, tmp_path):
    """Rows that are there keep their values, with null in the columns that were added; new rows have all of them."""
    shutil.copytree(prepared, storage.tables)
    promote([log_run(storage, tmp_path, seed=1, accuracy=0.5)], storage)
    assert predict(storage).predicted == 60
    path = storage.table("predictions")
    whole = spark.read.format("delta").load(path).toPandas()
    old = spark.createDataFrame(whole.head(25).drop(columns=list(ADDED_TO_PREDICTIONS)))
    shutil.rmtree(path)
    with_schema(old, StructType([field for field in PREDICTIONS if field.name in old.columns])).write.format(
        "delta"
    ).save(path)

    report = predict(storage)

    assert (report.predicted, report.errors) == (35, 0)
    found = spark.read.format("delta").load(path)
    assert sorted(found.columns) == sorted(PREDICTIONS.names)
    assert newest_snapshot(None, path).properties["delta.enableChangeDataFeed"] == "true"
    rows = {row["sha256"]: row for row in found.collect()}
    kept = set(whole.head(25)["sha256"])
    assert len(rows) == 60
    for expected in whole.to_dict("records"):
        row = rows[expected["sha256"]]
        assert (row["label"], row["probability"]) == (expected["label"], pytest.approx(expected["probability"]))
        if expected["sha256"] in kept:
            assert [row[name] for name in ADDED_TO_PREDICTIONS] == [None] * 6
        else:
            assert row["top_labels"][0] == row["label"]
            assert (row["index"], row["precision"]) == (sorted(row["top_labels"]).index(row["label"]), "float32")
            assert row["content_sha256"] == row["sha256"]  # small images are stored as they are
    assert predict(storage).predictions == report.predictions


def test_row_that_cannot_be_decoded_gets_an_error_and_a_new_version_predicts_all_rows(
    spark, source, storage, tmp_path, messages_of, monkeypatch
):
    """A bad image neither fails the job nor is dropped. An image that the table has twice is predicted once."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    good = next(source.glob("red/*.png")).read_bytes()
    rows = [("good", good, "red"), ("bad", b"bad", "violet"), ("good", good, "red")]
    commit_images(storage.table("own"), rows)
    promote([run], storage, "photos")
    report = predict(storage, "photos", table=storage.table("own"))
    assert (report.predicted, report.errors, report.unlearned) == (2, 1, ("violet",))
    messages = messages_of("lakevision.predict")
    assert any(line.startswith("photos version 1 was trained without violet of '") for line in messages)
    assert any(line.startswith("1 rows of ") for line in messages)
    assert [(image.path, bool(image.thumbnail)) for image in report.least_confident] == [("good", True)]
    assert [file.path for file in report.failed] == ["bad"]
    assert "not_an_image" in report.failed[0].error
    better = log_run(storage, tmp_path, seed=2, accuracy=0.9)
    assert promote([run, better], storage, "photos").run_id == better.run_id
    ended = note_ended_tasks(monkeypatch)
    report = predict(storage, "photos", table=storage.table("own"))
    assert (report.predicted, report.errors) == (2, 1)
    assert sum(done for _step, _part, done in ended) == 2, "a merge reads its source twice, and must not predict twice"
    again = predict(storage, "photos", table=storage.table("own"), retry_errors=True)
    assert (again.predicted, again.errors) == (1, 1)
    broken = pa.table({"sha256": [str(number) for number in range(10)], "content": [b"bad"] * 10})
    deltalake.write_deltalake(storage.table("broken"), broken)
    with pytest.raises(WrongInput, match="^10 of 10 images .* 'not_an_image") as refused:
        predict(storage, "photos", table=storage.table("broken"))
    assert refused.value.setting == "predict.max_error_fraction"
    assert keys_of(storage.table("predictions")) == [
        ("bad", 1),
        ("bad", 2),
        ("good", 1),
        ("good", 2),
    ]
    table = deltalake.DeltaTable(storage.table("predictions"))
    assert table.metadata().partition_columns == ["model_version"]
    assert {file.rsplit("/", 2)[1] for file in table.file_uris()} == {"model_version=1", "model_version=2"}
    (commit,) = table.history(1)
    assert commit["version"] == 2
    # With values in the condition, Delta skips the files of other models and versions.
    assert re.search(r"model_version#\d+L? = 2\b", commit["operationParameters"]["predicate"])


@pytest.mark.long
def test_contents_of_many_pending_images_stay_where_they_are_read(spark, prepared, storage, tmp_path, monkeypatch):
    """Only keys are sent: the plan has no exchange of contents, and an image with several rows is predicted once."""
    monkeypatch.setattr(scoring, "SENT_IMAGES", 0)
    shutil.copytree(prepared, storage.tables)
    promote([log_run(storage, tmp_path, seed=1, accuracy=0.5)], storage, "photos")
    rows = delta_rows(deltalake.DeltaTable(storage.table("images")), "sha256", "content").to_pylist()
    own = storage.table("own")

    def add(chosen):
        deltalake.write_deltalake(own, pa.Table.from_pylist(chosen), mode="append")

    plans, score = [], batch.score

    def score_explained(contents, *others):
        plans.append(contents._jdf.queryExecution().toString())
        return score(contents, *others)

    monkeypatch.setattr(batch, "score", score_explained)
    for number in range(3):
        add(rows[20 * number : 20 * number + 10])
    assert predict(storage, "photos", table=own).predicted == 30
    add(rows[10:20])
    assert predict(storage, "photos", table=own).predicted == 10
    add([*rows[30:40], rows[30], rows[0]])
    ended = note_ended_tasks(monkeypatch)
    assert predict(storage, "photos", table=own).predicted == 10
    assert sum(done for _step, _part, done in ended) == 10
    whole, new, repeated = (re.sub("BroadcastExchange", "", plan) for plan in plans)
    assert "Exchange" not in whole
    assert "Exchange" not in new
    assert "BroadcastHashJoin" in new
    assert repeated.count("Exchange") >= 1  # of the images with several rows
    predicted = [row["sha256"] for row in rows_of(storage.table("predictions"))]
    assert sorted(predicted) == sorted(row["sha256"] for row in rows[:50])


def test_class_named_unsure_allows_no_minimum_probability(spark, source, storage, tmp_path):
    """The run ends before images are predicted, with the setting and its value."""
    commit_images(storage.table("images"), [("a", b"no image", "red")])
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5, classes=("blue", "green", "unsure"))
    promote([run], storage, "photos")
    with pytest.raises(WrongInput, match="is 0.5, but 'unsure'") as refused:
        predict(storage, "photos", table=storage.table("images"), min_probability=0.5)
    assert refused.value.setting == "predict.min_probability"
    assert newest_snapshot(None, storage.table("predictions")) is None


def test_rate_that_the_model_cannot_use_ends_the_run(spark, source, storage, tmp_path):
    """A class is named `unknown`, or the model is of an earlier release: the run ends before images are predicted."""
    commit_images(storage.table("images"), [("a", b"no image", "red")])
    thresholds = tuple(1 - rate for rate in RATES)
    classes = ("blue", "green", "unknown")
    named = log_run(storage, tmp_path, seed=1, accuracy=0.5, classes=classes, unknown_thresholds=thresholds)
    for run, name, reason in (
        (named, "named", "but 'unknown' is a class of the model: give 0"),
        (log_run(storage, tmp_path, seed=2, accuracy=0.5), "early", "but the model has no thresholds"),
    ):
        promote([run], storage, name)
        with pytest.raises(WrongInput, match=rf"predict\.unknown_rate is 0\.05, {reason}") as refused:
            predict(storage, name, table=storage.table("images"), unknown_rate=0.05)
        assert refused.value.setting == "predict.unknown_rate"
    assert newest_snapshot(None, storage.table("predictions")) is None
    assert predict(storage, "named", table=storage.table("images")).predicted == 1


def test_predictions_table_of_another_form_is_refused_before_images_are_predicted(
    spark, prepared, storage, tmp_path, monkeypatch
):
    """The message names the columns, and the model is not even fetched."""
    shutil.copytree(prepared, storage.tables)
    promote([log_run(storage, tmp_path, seed=1, accuracy=0.5)], storage)
    other = pa.table({"sha256": ["a"], "model_name": ["m"], "model_version": ["1"]})
    deltalake.write_deltalake(storage.table("other"), other)
    monkeypatch.setattr(batch, "send_package", None)
    with pytest.raises(WrongInput) as refused:
        predict(storage, predictions=storage.table("other"))
    assert "a table that has model_version (string) and lacks model_version (bigint), label (string)" in str(
        refused.value
    )


def test_alias_that_moves_during_a_run_counts_from_the_next(spark, prepared, storage, tmp_path, monkeypatch):
    """All rows of a run are of the version that it looked up at its start."""
    shutil.copytree(prepared, storage.tables)
    first, second = (log_run(storage, tmp_path, seed, accuracy=0.5) for seed in (1, 2))
    name = promote([first], storage).name
    send = batch.send_package

    def move_first(*arguments):
        set_alias(storage, register_run(storage, second, name), CHAMPION)
        return send(*arguments)

    monkeypatch.setattr(batch, "send_package", move_first)
    reports = [predict(storage) for _ in range(2)]
    assert [(report.model.version, report.predicted) for report in reports] == [(1, 60), (2, 60)]
    keys = keys_of(storage.table("predictions"))
    assert Counter(version for _sha256, version in set(keys)) == {1: 60, 2: 60}
    assert len(keys) == 120


def test_missing_model_table_or_column_is_named(spark, source, storage, tmp_path):
    """A missing champion, table, column and model name each have an error of one sentence."""
    with pytest.raises(WrongInput, match="'photos' .* alias 'champion'"):
        predict(storage, "photos")
    with pytest.raises(WrongInput, match="is not a Delta table"):
        predict(storage)
    promote([log_run(storage, tmp_path, seed=1, accuracy=0.5)], storage, "photos")
    deltalake.write_deltalake(storage.table("images"), pa.table({"sha256": ["a"]}))
    with pytest.raises(WrongInput, match=r"/images' .*'champion' of photos\)$") as refused:
        predict(storage)
    assert refused.value.setting == "promote.model_name"
    with pytest.raises(WrongInput, match="has no column content") as refused:
        predict(storage, "photos", table=storage.table("images"))
    assert refused.value.setting == "predict.table"


@pytest.mark.long
def test_data_sets_of_one_stack_have_separate_tables_and_models(spark, make_images, storage, tmp_path, messages_of):
    """With one registry and two folders of tables, no champion labels the images of the other by accident."""
    first, second = (
        storage.model_copy(update={"tables": f"{storage.home}/{name}"}) for name in ("tables-cats", "tables-dogs")
    )
    champions = {}
    for seed, (data, name) in enumerate(((first, "cats"), (second, "dogs"))):
        ingest(make_images(per_class=seed + 3, name=name), data)
        run = log_run(data, tmp_path, seed, accuracy=0.5 + seed / 10)
        champions[name] = promote([run], data)
    assert sorted(found.name for found in champions.values()) == ["lakevision-cats", "lakevision-dogs"]
    for data, name, images in ((first, "cats", 9), (second, "dogs", 12)):
        report = predict(data)
        assert (report.model, report.predicted) == (champions[name], images)
    dogs = champions["dogs"].name
    with pytest.raises(WrongInput) as rejected:
        predict(first, dogs)
    assert f"{dogs} version 1 was trained on another table, of images of '{tmp_path}/dogs', and not on" in str(
        rejected.value
    )
    assert "leave promote.model_name empty" in str(rejected.value)
    # The user names both the model and the table.
    report = predict(first, dogs, table=first.table("images"))
    assert (report.model, report.predicted) == (champions["dogs"], 9)
    assert any("was trained on another table" in line for line in messages_of("lakevision.predict"))
    # A promotion for this table returned the model, as for tables with the same images: no second check.
    settings = (PredictConfig(), PromoteConfig(model_name=dogs), first, SparkConfig())
    table = newest_snapshot(None, first.table("images")).table
    assert predict_batch(*settings, table, champions["dogs"]).model == champions["dogs"]
    # The same table now holds another source, whose champion was trained on another table.
    ingest_images(EtlConfig(source=f"{tmp_path}/dogs", replace_source=True), first, SparkConfig())
    with pytest.raises(WrongInput, match="lakevision-dogs version 1 was trained on another table"):
        predict(first)
    with pytest.raises(WrongInput, match="version 1 was trained on .* '.*/cats'"):
        predict(first, champions["cats"].name)
