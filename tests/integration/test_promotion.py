"""Promotion on a real registry, whose champion never gets worse."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import mlflow
import pyarrow as pa
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter

from flows.promote import promote
from flows.rollback import rollback
from tasks.config.etl import EtlConfig
from tasks.config.prediction import PredictConfig, PromoteRun
from tasks.config.promotion import PromoteConfig, RollbackConfig, RollbackRun
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.errors import AccessDenied, WrongInput
from tasks.etl.ingest import ingest_images
from tasks.model_package.classifier import ImageClassifier
from tasks.model_package.description import NEWEST, RATES
from tasks.orchestration.stage import StageLog
from tasks.predict import evaluation
from tasks.predict.champion import check_model
from tasks.refs import EtlReport, ModelRef, PredictReport, RunRef, TableRef, Verdict
from tasks.registry import promote as promote_module
from tasks.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, predict_once
from tasks.registry.decision import Approval
from tasks.registry.promote import check_promotion, promote_best
from tasks.registry.rollback import roll_back
from tasks.registry.task import promote_run
from tasks.report import MODEL_CARD_FILE
from tasks.schema import PREDICTIONS, PREDICTIONS_ARROW
from tasks.spark.session import NeedsSpark
from tasks.storage import resolve_storage
from tasks.summary.summary import make_summary
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking import models
from tasks.tracking.evaluated import FOLDS_METRICS
from tasks.tracking.pins import read_pins
from tasks.tracking.runs import read_artifact
from tasks.tracking.searches import trial_tags
from tasks.tracking.server import client_of, prepare_tracking
from tasks.tracking.trained import logged_training, mark_chosen, newest_training, promotable_runs
from tasks.tracking.trained_tables import served_tables, trained_versions
from tests.builders.delta_rows import delta_rows
from tests.builders.disks import mounted_disk
from tests.builders.hand_made_cache import SIDE, hand_made_cache
from tests.builders.untrained_model import PHOTOS, log_run

NAME = "photos"
NAMED = PromoteConfig(model_name=NAME)
REPLACING = PromoteConfig(model_name=NAME, replace_unusable=True)


def champion(storage, name: str = NAME) -> ModelRef | None:
    """Return the version with the alias `champion`."""
    return models.model_with_alias(storage, name, CHAMPION)


def test_worse_equal_and_resubmitted_runs_do_not_replace_the_champion(storage, tmp_path, messages_of, caplog):
    """A champion of 0.90 stays after runs of 0.36 and 0.90, after itself again, and after a failed gate."""
    caplog.set_level("INFO", "lakevision")
    first = log_run(storage, tmp_path, seed=1, accuracy=0.6)
    better = log_run(storage, tmp_path, seed=2, accuracy=0.9)
    worse = log_run(storage, tmp_path, seed=3, accuracy=0.36)
    equal = log_run(storage, tmp_path, seed=4, accuracy=0.9)
    assert promote_best([first], NAMED, storage).outcome == "promoted"
    made = promote_best([better], NAMED, storage)
    assert (made.outcome, made.champion_accuracy) == ("promoted", 0.6)
    tags = models.version_tags(storage, made.champion)
    assert (tags["previous_champion"], tags["test_accuracy"], tags["lakevision.table_id"]) == (
        "1",
        "0.900000",
        "photos",
    )
    for run in (worse, equal, first):
        kept = promote_best([run], NAMED, storage)
        assert (kept.outcome, kept.champion) == ("kept", made.champion)
        assert champion(storage) == made.champion
        assert models.version_tags(storage, made.champion)["lakevision.promotion"] == kept.sentence
        assert kept.sentence in messages_of("lakevision.registry")
    assert "is version 1 already, which is older" in kept.reason
    # Rejected runs are not registered: they would keep table versions from maintenance.
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert len(client.search_model_versions(f"name = '{NAME}'")) == 2
    assert promote_best([worse, better], NAMED, storage).outcome == "unchanged"
    assert promote_best([], NAMED, storage).champion == made.champion
    with pytest.raises(WrongInput, match="below promote.min_test_accuracy 0.95"):
        promote_best([worse], PromoteConfig(model_name=NAME, min_test_accuracy=0.95), storage)
    assert champion(storage) == made.champion


def test_champion_of_an_older_version_is_tested_again_on_the_same_images(source, storage, tmp_path):
    """The recorded accuracy is of other images, so the champion is tested on the challenger's cache."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    old = log_run(storage, tmp_path, seed=1, accuracy=0.99, content="older", image_size=SIDE)
    before = promote_best([old], NAMED, storage).champion
    newer = PHOTOS.model_copy(update={"version": 7})
    files = sorted(source.glob("*/*.png"), key=lambda file: (file.name, file.parent.name))[50:]
    predictions = ImageClassifier.load(tmp_path / "classifier-1").predict([file.read_bytes() for file in files])
    right = sum(found.label == file.parent.name for found, file in zip(predictions, files, strict=True)) / len(files)
    assert 0 < right < 0.99

    equal = log_run(storage, tmp_path, seed=2, accuracy=right, table=newer, content="newer", cache=cache)
    kept = promote_best([equal], NAMED, storage)
    assert (kept.outcome, kept.champion) == ("kept", before)
    assert kept.champion_accuracy == pytest.approx(right)
    assert kept.champion_images == kept.challenger_images == 10
    assert "on the same images, on which it was tested again" in kept.reason

    better = log_run(storage, tmp_path, seed=3, accuracy=1.0, table=newer, content="newer", cache=cache)
    made = promote_best([better], NAMED, storage)
    assert (made.outcome, made.champion.run_id) == ("promoted", better.run_id)
    # A run of the older version cannot win, whatever its accuracy there.
    older = log_run(storage, tmp_path, seed=4, accuracy=1.0, content="older")
    again = promote_best([older], NAMED, storage)
    assert (again.outcome, again.champion) == ("kept", made.champion)
    assert "was trained on version 3 of the table, and the champion on version 7" in again.reason
    served = served_tables(models.version_tags(storage, made.champion), NAME)
    assert [table.version for table in served] == [7]


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"image_size": 48}, "it takes images of 48 pixels and the cache's have 24"),
        (
            {"image_size": SIDE, "decoding": NEWEST},
            "it decodes images by version 3, and the cache's are decoded by version 1",
        ),
    ],
    ids=["image_size", "decoding"],
)
def test_champion_that_cannot_be_tested_again_stays_with_the_reason(source, storage, tmp_path, given, difference):
    """A champion of another image size or decoding than the cache stays where its table is missing."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    old = log_run(storage, tmp_path, seed=1, accuracy=0.8, content="older", **given)
    promote_best([old], NAMED, storage)
    newer = PHOTOS.model_copy(update={"version": 7})
    for seed, accuracy in ((2, 0.7), (3, 0.95)):  # measured on other images than the champion's 0.8
        run = log_run(storage, tmp_path, seed, accuracy, table=newer, content="newer", cache=cache)
        kept = promote_best([run], NAMED, storage)
        assert kept.outcome == "kept"
        assert f"could not be tested again: {difference}" in kept.reason
        assert "its accuracy of 0.8000 was measured on 10 test images of an earlier version" in kept.reason
    replaced = promote_best([run], REPLACING, storage)
    assert (replaced.outcome, replaced.champion.run_id) == ("promoted", run.run_id)


def write_images(storage, source, splits: list[str]) -> TableRef:
    """Write one image for each split to the table `images`; return the new version."""
    files = sorted(source.glob("*/*.png"))[::2][: len(splits)]
    rows = {
        "sha256": [str(number) for number in range(len(files))],
        "label": [file.parent.name for file in files],
        "content": [file.read_bytes() for file in files],
        "split": splits,
    }
    deltalake.write_deltalake(storage.table("images"), pa.table(rows), mode="overwrite")
    return newest_snapshot(None, storage.table("images")).table


def removed_files(table: TableRef) -> list[Path]:
    """Return the files of an earlier version of a table."""
    added = pa.table(deltalake.DeltaTable(table.path, version=table.version).get_add_actions())
    return [Path(table.path) / name for name in added["path"].to_pylist()]


def predicted_rows(storage) -> list[dict]:
    """Return the rows of the table `predictions`."""
    return delta_rows(deltalake.DeltaTable(storage.table("predictions"))).to_pylist()


def test_gate_compares_the_predictions_of_the_same_images(source, storage, tmp_path):
    """At each model's image size, without the images that the champion was trained on; the rows are the evidence.

    A champion of an earlier release has no thresholds for the label `unknown`, and is compared all the same.
    """
    older = write_images(storage, source, ["train"] * 6 + ["test"] * 10 + ["val"] * 14)
    newer = write_images(storage, source, ["test"] * 16 + ["train"] * 12 + ["val"] * 2)
    images = deltalake.DeltaTable(newer.path).to_pyarrow_table().to_pylist()[:16]
    old = log_run(storage, tmp_path, 1, 0.99, table=older, content="older", image_size=48)
    before = promote_best([old], NAMED, storage).champion
    (pins,) = read_pins(newer.path).values()
    assert (pins.shown, pins.versions) == (storage.tracking, {older.version})
    assert newest_snapshot(None, newer.path).table == newer  # a pin makes no commit
    assert newest_snapshot(None, storage.table("predictions")) is None
    run = log_run(storage, tmp_path, 2, 1.0, table=newer, content="newer", unknown_thresholds=len(RATES) * (0.0,))
    found = {
        seed: ImageClassifier.load(tmp_path / f"classifier-{seed}").predict([image["content"] for image in images], 2)
        for seed in (1, 2)
    }
    right = {
        seed: sum(one.label == image["label"] for one, image in list(zip(predictions, images, strict=True))[6:]) / 10
        for seed, predictions in found.items()
    }
    assert right[2] != right[1]
    any_figures = PromoteConfig(model_name=NAME, min_accuracy_gain=-1.0, max_recall_drop=1.0)
    never = any_figures.model_copy(update={"min_accuracy_gain": 1.0})

    kept = promote_best([run], never, storage, predict=PredictConfig(top_k=2, unknown_rate=0.5))

    figures = kept.comparison
    assert (kept.outcome, kept.champion) == ("kept", before)
    assert (figures.images, figures.left_out) == (10, 6)
    assert (figures.challenger_accuracy, figures.champion_accuracy) == (right[2], right[1])
    assert (kept.challenger_accuracy, kept.champion_accuracy, kept.champion_images) == (right[2], right[1], 10)
    assert f"{right[2]:.4f} of 10 test images correctly, the champion {right[1]:.4f} (6 images that" in kept.reason
    assert kept.reason.endswith("it is not better by more than promote.min_accuracy_gain 1.0")
    rows = predicted_rows(storage)
    for version, seed in ((1, 1), (2, 2)):
        own = {row["sha256"]: row for row in rows if (row["model_name"], row["model_version"]) == (NAME, version)}
        labels = [one.label if seed == 1 else "unknown" for one in found[seed]]
        assert [own[image["sha256"]]["label"] for image in images] == labels
        assert [own[image["sha256"]]["unknown_score"] is None for image in images] == 16 * [seed == 1]
        assert [own[image["sha256"]]["top_labels"] for image in images] == [list(one.top_labels) for one in found[seed]]
        assert {row["precision"] for row in own.values()} == {"float32"}
    assert len(rows) == 32
    # The version that lost keeps its place in the registry, and no version of the table from maintenance.
    challenger = models.model_with_alias(storage, NAME, CHALLENGER)
    assert (challenger.version, challenger.run_id) == (2, run.run_id)
    tags = models.version_tags(storage, challenger)
    assert tags["lakevision.promotion"] == kept.sentence
    assert tags["lakevision.not_promoted"] == kept.reason
    assert {table.version for table in trained_versions(storage)} == {older.version, newer.version}  # serves
    assert [pins.versions for pins in read_pins(newer.path).values()] == [{older.version, newer.version}]

    # As by a batch inference with a minimum probability: the most probable class counts.
    unsure = [row | {"label": "unsure"} if row["model_version"] == 2 else row for row in rows]
    table = pa.Table.from_pylist(unsure, PREDICTIONS_ARROW)
    deltalake.write_deltalake(storage.table("predictions"), table, mode="overwrite")
    made = promote_best([run], any_figures, storage)

    assert (made.outcome, made.champion, made.comparison) == ("promoted", challenger, figures)
    assert aliases(storage) == (2, 1)
    assert models.model_with_alias(storage, NAME, CHALLENGER) is None
    assert "lakevision.not_promoted" not in models.version_tags(storage, challenger)
    assert len(predicted_rows(storage)) == 32


@pytest.mark.long
@pytest.mark.parametrize("newer", ["images", "predictions"])
def test_gate_compares_on_tables_that_need_spark(spark, source, storage, tmp_path, newer):
    """Newer features of Delta's protocol in one of the tables: figures and rows are those of plain tables.

    The tables have one test image twice, or all. Predictions of other bytes stay, and do not count.
    """
    figures, rows, runs, stale = [], [], [], []
    repeated = [0] if newer == "images" else list(range(0, 20, 2))
    for name in ("plain", "newer"):
        where = storage.model_copy(update={"tables": f"{storage.home}/{name}"})
        table = write_images(where, source, ["test", "train"] * 10)
        again = deltalake.DeltaTable(table.path).to_pyarrow_table().take(repeated)
        deltalake.write_deltalake(table.path, again, mode="append")
        runs = runs or [log_run(where, tmp_path, seed, 0.5, table=table) for seed in (1, 2)]
        if name == "newer" and newer == "images":
            spark.sql(f"ALTER TABLE delta.`{table.path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
            with pytest.raises(NeedsSpark):
                newest_snapshot(None, table.path)
        if name == "newer" and newer == "predictions":
            empty = spark.createDataFrame([], PREDICTIONS)
            empty.write.format("delta").option("delta.enableRowTracking", "true").save(where.table("predictions"))
        named = PromoteConfig(model_name=name, min_accuracy_gain=-1.0, max_recall_drop=1.0)
        promote_best(runs[:1], named, where, table)
        if name == "newer" and newer == "predictions":
            stale = again["sha256"].to_pylist()[:3]
            values = [{"sha256": sha256, "model_name": name, "model_version": 1, "label": "none"} for sha256 in stale]
            known = pa.Table.from_pylist(
                [row | {"predicted_at": datetime.now(UTC)} for row in values], PREDICTIONS_ARROW
            )
            spark.createDataFrame(known).write.format("delta").mode("append").save(where.table("predictions"))
        made = promote_best(runs[1:], named, where, table)
        assert (made.outcome, made.champion.version) == ("promoted", 2)
        figures.append(made.comparison.model_copy(update={"table_version": None}))
        found = spark.read.format("delta").load(where.table("predictions")).collect()
        rows.append({(row["sha256"], row["model_version"]): (row["label"], row["probability"]) for row in found})
        assert len(found) == len(rows[-1]) == 20
    assert figures[0] == figures[1]
    assert rows[0].keys() == rows[1].keys()
    for (sha256, version), (label, probability) in rows[0].items():
        if version == 1 and sha256 in stale:
            assert rows[1][sha256, version] == ("none", None)
        else:
            assert rows[1][sha256, version] == (label, pytest.approx(probability, rel=1e-4))


def test_images_of_the_current_table_count_for_a_run_on_an_older_version(source, storage, tmp_path):
    """Images that were added to `test` count for both models; images that one was trained on for none."""
    older = write_images(storage, source, ["test"] * 6 + ["train"] * 4)
    newer = write_images(storage, source, ["test"] * 8 + ["train"] * 2 + ["test"] * 15)
    promote_best([log_run(storage, tmp_path, 1, 0.5, table=older)], NAMED, storage)
    run = log_run(storage, tmp_path, 2, 0.5, table=older)
    any_figures = PromoteConfig(model_name=NAME, min_accuracy_gain=-1.0, max_recall_drop=1.0)

    made = promote_best([run], any_figures, storage)

    figures = made.comparison
    assert (figures.images, figures.left_out, figures.table_version) == (21, 2, newer.version)
    assert (made.outcome, made.challenger_images, made.champion_images) == ("promoted", 21, 21)
    moved = storage.model_copy(update={"tables": f"{storage.home}/moved"})
    Path(storage.tables).rename(moved.tables)
    again = promote_best(
        [log_run(moved, tmp_path, 4, 0.5, table=newer, content="newer")], any_figures, moved
    ).comparison
    assert (again.images, again.left_out) == (21, 2)
    write_images(moved, source, ["train"] * 8 + ["test"] * 2)
    with pytest.raises(WrongInput, match="was trained on all 2 test images of version 2"):
        promote_best([log_run(moved, tmp_path, 3, 0.5, table=newer, content="newer")], any_figures, moved)


def weights_of(storage, run: RunRef) -> Path:
    """Return the weights file that a run logged."""
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    logged = client.get_run(run.run_id).outputs.model_outputs[0].model_id
    folder = Path(client.get_logged_model(logged).artifact_location.removeprefix("file://"))
    return next(folder.glob("data/*/weights.safetensors"))


def test_damaged_model_or_table_is_noticed_before_the_champion_changes(source, storage, tmp_path):
    """Weights of another run and predictions in another form are refused; a damaged champion does not count."""
    table = write_images(storage, source, ["test", "train"] * 10)
    first, second, third = (log_run(storage, tmp_path, seed, 0.5, table=table) for seed in (1, 2, 3))
    promote_best([first], NAMED, storage)
    champions, challengers = (weights_of(storage, run) for run in (first, second))
    contents = [file.read_bytes() for file in (champions, challengers)]
    other_weights = weights_of(storage, third).read_bytes()

    challengers.write_bytes(other_weights)
    with pytest.raises(WrongInput, match="photos version 2 has a file weights.safetensors"):
        promote_best([second], NAMED, storage)
    challengers.write_bytes(contents[1])
    other = pa.table({"sha256": ["a"], "model_name": ["m"], "model_version": ["1"]})
    deltalake.write_deltalake(storage.table("predictions"), other)
    with pytest.raises(WrongInput, match=r"has model_version \(string\) and lacks"):
        promote_best([second], NAMED, storage)
    shutil.rmtree(storage.table("predictions"))
    assert aliases(storage) == (1, None)
    assert len(decisions(storage)) == 1

    champions.write_bytes(other_weights)
    kept = promote_best([second], NAMED, storage)
    assert (kept.outcome, aliases(storage)) == ("kept", (1, None))
    made = promote_best([second], REPLACING, storage)
    assert (made.outcome, made.comparison) == ("promoted", None)
    assert (
        "cannot be evaluated, so only the limits of a run counted: photos version 1 has a file weights" in made.reason
    )
    assert aliases(storage) == (2, 1)
    assert {row["model_version"] for row in predicted_rows(storage)} == {2}


def test_decision_that_is_repeated_is_one_row(storage, tmp_path):
    """A run that lost adds a row again only if the champion or the reason is another."""
    runs = [log_run(storage, tmp_path, seed, accuracy) for seed, accuracy in ((1, 0.6), (2, 0.98), (3, 1.0))]
    worse = log_run(storage, tmp_path, 4, accuracy=0.3)
    promote_best(runs[:1], NAMED, storage)
    for _ in range(2):
        assert promote_best([worse], NAMED, storage).outcome == "kept"
    promote_best(runs[1:2], NAMED, storage)
    for _ in range(2):
        assert roll_back(RollbackConfig(model_name=NAME, version=2), storage).champion.version == 1
    assert aliases(storage) == (1, None)
    for _ in range(2):
        assert promote_best([worse], NAMED, storage).outcome == "kept"
    assert [(row["decision"], row["from_version"], row["to_version"]) for row in decisions(storage)] == [
        ("promoted", None, 1),
        ("kept", 1, 1),
        ("promoted", 1, 2),
        ("rolled back", 2, 1),
        ("kept", 1, 1),
    ]
    promote_best(runs[2:], NAMED, storage)
    done = roll_back(RollbackConfig(model_name=NAME, version=2), storage)
    assert done.sentence == "photos version 2 was rolled back before; version 3 is the champion"
    with pytest.raises(WrongInput, match="is 1, but .* 'photos' is version 3") as refused:
        roll_back(RollbackConfig(model_name=NAME, version=1), storage)
    assert refused.value.setting == "rollback.version"
    assert aliases(storage) == (3, 1)


def test_direct_call_that_must_ask_is_refused(prefect_harness, storage):
    """No worker would start it again after the answer."""
    config = {"run_ids": ["0" * 32], "promote": {"approval": "human"}, "storage": {"home": storage.home}}
    with pytest.raises(WrongInput, match="deployment promote") as refused:
        promote(PromoteRun.model_validate(config))
    assert refused.value.setting == "promote.approval"


def test_table_without_test_images_or_at_the_path_of_another_is_not_compared_on(source, storage, tmp_path):
    """The first is refused; for the second, the recorded accuracies count."""
    table = write_images(storage, source, ["test"] * 6)
    promote_best([log_run(storage, tmp_path, 1, 0.5, table=table)], NAMED, storage)
    empty = write_images(storage, source, ["train"] * 6)
    run = log_run(storage, tmp_path, 2, 0.6, table=empty, content="newer")
    with pytest.raises(WrongInput, match=f"version {empty.version} of '.*' has no test images"):
        promote_best([run], NAMED, storage)
    gone = table.model_copy(update={"table_id": "gone"})
    made = promote_best([log_run(storage, tmp_path, 3, 0.7, table=gone)], NAMED, storage)
    assert (made.outcome, made.comparison, made.champion_accuracy) == ("promoted", None, 0.5)


def test_champion_that_was_trained_on_all_test_images_stays(source, storage, tmp_path, caplog):
    """Nothing is left to compare the two on: a user decides. One whose training images are unknown is compared."""
    older = write_images(storage, source, ["train"] * 10 + ["test"] * 4 + ["val"] * 4)
    newer = write_images(storage, source, ["test"] * 10 + ["train"] * 4 + ["val"] * 4)
    promote_best([log_run(storage, tmp_path, 1, 0.99, table=older, content="older")], NAMED, storage)
    run = log_run(storage, tmp_path, 2, 0.1, table=newer, content="newer")
    kept = promote_best([run], NAMED, storage)
    assert (kept.outcome, aliases(storage)) == ("kept", (1, None))
    assert "the champion cannot be evaluated, so it stays: it was trained on all 10 test images; to rep" in kept.reason
    human = NAMED.model_copy(update={"approval": "human"})
    asked = promote_best([run], human, storage)
    assert (asked.outcome, aliases(storage)) == ("waiting", (1, None))
    answer = Approval(approved=True, by="reviewer", comment="", champion_version=1)
    made = promote_best([run], human, storage, approval=answer)
    assert made.outcome == "promoted"
    assert "cannot be evaluated, so only the limits of a run counted: it was trained on all 10 test" in made.reason
    last = write_images(storage, source, ["test"] * 10 + ["train"] * 3 + ["val"] * 3)
    for file in removed_files(newer):
        file.unlink()
    again = promote_best([log_run(storage, tmp_path, 3, 0.1, table=last, content="last")], NAMED, storage)
    assert (again.comparison.images, again.comparison.left_out) == (10, 0)
    assert "on which the champion was trained, cannot be read: its images are not left out" in "\n".join(
        caplog.messages
    )


def test_champion_that_cannot_be_loaded_stays_until_a_user_gives_a_reason(source, storage, tmp_path):
    """Only the limits of the run count then, whatever the accuracy that the champion had."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    old = log_run(storage, tmp_path, seed=1, accuracy=0.8, content="older", image_size=SIDE)
    before = promote_best([old], NAMED, storage).champion
    models.tag_version(storage, before, {"lakevision.sha256.weights.safetensors": "0"})
    newer = PHOTOS.model_copy(update={"version": 7})
    run = log_run(storage, tmp_path, seed=2, accuracy=0.7, table=newer, content="newer", cache=cache)
    limited = PromoteConfig(model_name=NAME, min_test_accuracy=0.75)
    with pytest.raises(WrongInput, match=r"0\.7000, below promote\.min_test_accuracy 0\.75"):
        promote_best([run], limited, storage)
    kept = promote_best([run], NAMED, storage)
    assert (kept.outcome, kept.champion) == ("kept", before)
    made = promote_best([run], NAMED, storage, reason="its disk was lost")
    assert made.outcome == "promoted"
    assert made.reason.endswith("; it is replaced, since its disk was lost")
    message = (
        "the champion cannot be evaluated, so only the limits of a run counted: photos version 1 has a file weights"
    )
    assert message in made.reason


@pytest.mark.parametrize("denied", ["version", "cache"])
def test_champion_that_may_not_be_read_now_is_not_replaced(source, storage, tmp_path, monkeypatch, denied):
    """An expired login, and a store that does not answer, say nothing about the champion, whatever the settings."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    old = log_run(storage, tmp_path, seed=1, accuracy=0.8, content="older", image_size=SIDE)
    before = promote_best([old], NAMED, storage).champion
    newer = PHOTOS.model_copy(update={"version": 7})
    run = log_run(storage, tmp_path, seed=2, accuracy=0.7, table=newer, content="newer", cache=cache)
    with monkeypatch.context() as now:
        if denied == "cache":
            now.setattr(evaluation, "open_cache", raising(TimeoutError("the store does not answer")))
            expected = pytest.raises(TimeoutError, match="the store does not answer")
        else:  # As MLflow's client raises it for the status 403.
            forbidden = MlflowException("403 Forbidden", error_code=PERMISSION_DENIED)
            now.setattr(MlflowClient, "get_model_version_download_uri", raising(forbidden))
            expected = pytest.raises(AccessDenied, match="denies access")
        with expected:
            promote_best([run], REPLACING, storage, reason="it is old")
    assert champion(storage) == before


def raising(error: Exception):
    """Return a function that raises an error."""

    def fail(*_args, **_kwargs):
        raise error

    return fail


def test_run_whose_table_version_cannot_be_pinned_is_not_promoted(source, storage, tmp_path):
    """A clean-up of another tracking server would delete what it was trained on; a moved table is found by its id."""
    table = write_images(storage, source, ["train", "test"])
    run = log_run(storage, tmp_path, 1, 0.9, table=table.model_copy(update={"path": "/former/home/tables/images"}))
    (Path(table.path) / "_pins").write_text("")
    with pytest.raises(WrongInput, match="'.*/tables/images/_pins/_pins' is not a pin"):
        promote_best([run], NAMED, storage)
    assert champion(storage) is None
    (Path(table.path) / "_pins").unlink()
    assert promote_best([run], NAMED, storage).outcome == "promoted"
    assert [pins.versions for pins in read_pins(table.path).values()] == [{table.version}]


def test_table_that_may_only_be_read_is_refused_before_training_and_before_registering(source, storage, tmp_path):
    """No file stays of the check; a version that is pinned already needs no write."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    Path(storage.tables).mkdir(parents=True)
    with mounted_disk(Path(storage.table("images")), storage, 20_000) as disk:
        table = write_images(storage, source, ["train", "test"])
        run = log_run(storage, tmp_path, 1, 0.9, table=table)
        check_promotion(NAMED, storage, table, cache)
        assert read_pins(table.path) == {}
        disk.remount("ro")
        refused = r"pins clean-ups keep .* is '.*/images/_pins/[0-9a-f]{16}', where nothing can be written \(Read-only"
        with pytest.raises(WrongInput, match=refused):
            check_promotion(NAMED, storage, table, cache)
        with pytest.raises(WrongInput, match=refused):
            promote_best([run], NAMED, storage)
        assert not models.has_model(storage, NAME)
        disk.remount("rw")
        assert promote_best([run], NAMED, storage).outcome == "promoted"
        disk.remount("ro")
        check_promotion(NAMED, storage, table, cache)
        assert promote_best([run], NAMED, storage).outcome == "unchanged"


def test_champion_is_shared_by_tables_with_the_same_images(storage, tmp_path):
    """Each table predicts with the champion that its promotion returned, and a third table does not."""
    other = PHOTOS.model_copy(update={"table_id": "copy", "path": "/tables/copy/images"})
    third = PHOTOS.model_copy(update={"table_id": "third", "path": "/tables/third/images"})
    run = log_run(storage, tmp_path, seed=1, accuracy=0.9)
    made = promote_best([run], NAMED, storage, PHOTOS)
    worse = log_run(storage, tmp_path, seed=2, accuracy=0.8, table=other)
    assert promote_best([worse], NAMED, storage, other).champion == made.champion
    assert promote_best([run], NAMED, storage, other).outcome == "unchanged"
    for table in (PHOTOS, other):
        check_model(made.champion, table, PredictConfig(), NAMED, storage)
    for given, way_out in (
        (NAMED, "leave promote.model_name empty"),
        (PromoteConfig(), "'/tables/third/images', [^:]*: name the"),
    ):
        with pytest.raises(WrongInput, match=way_out):
            check_model(made.champion, third, PredictConfig(), given, storage)
    kept = {table.table_id for table in trained_versions(storage)}
    assert kept == {"photos", "copy"}


def test_two_promotions_at_once_leave_the_better_run(storage, tmp_path, monkeypatch):
    """The second promotion waits for the first, and compares with its champion."""
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.3)], NAMED, storage)
    good = log_run(storage, tmp_path, seed=2, accuracy=0.9)
    bad = log_run(storage, tmp_path, seed=3, accuracy=0.36)
    register, registering, done = models.register_run, threading.Event(), threading.Event()

    def register_slowly(storage, run, *rest):
        if run == bad:
            registering.set()
            done.wait(2)  # set within 2 s only where the second promotion does not wait
        return register(storage, run, *rest)

    monkeypatch.setattr("tasks.tracking.models.register_run", register_slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(promote_best, [bad], NAMED, storage)
        assert registering.wait(60)
        second = pool.submit(promote_best, [good], NAMED, storage)
        second.add_done_callback(lambda _: done.set())
        assert first.result().outcome == second.result().outcome == "promoted"
    assert champion(storage).run_id == good.run_id


@pytest.mark.parametrize("theirs", [0.9, 0.33])
def test_champion_that_changed_during_a_promotion_is_compared_again(storage, tmp_path, monkeypatch, theirs):
    """A promotion on another machine does not share the lock; its champion stays where it is better."""
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.3)], NAMED, storage)
    other = log_run(storage, tmp_path, seed=2, accuracy=theirs)
    ours = log_run(storage, tmp_path, seed=3, accuracy=0.36)
    tag, moved = models.tag_version, []

    def tag_and_move(storage, model, tags):
        tag(storage, model, tags)
        if model.run_id == ours.run_id and not moved:
            moved.append(models.register_run(storage, other, NAME))
            models.set_alias(storage, moved[0], CHAMPION)

    monkeypatch.setattr("tasks.tracking.models.tag_version", tag_and_move)
    made = promote_best([ours], NAMED, storage)
    assert made.outcome == ("kept" if theirs > 0.36 else "promoted")
    assert champion(storage).run_id == (other if theirs > 0.36 else ours).run_id
    version = models.registered_version(storage, ours, NAME)
    assert models.version_tags(storage, version)["lakevision.promotion"] == made.sentence


def test_invalid_values_in_the_registry_are_reported_or_ignored(storage, tmp_path):
    """A version without a valid run is rejected in one sentence; invalid tags are ignored."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.8)
    made = promote_best([run], NAMED, storage).champion
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    logged = client.get_run(run.run_id).outputs.model_outputs[0].model_id
    source = client.get_logged_model(logged).artifact_location
    for run_id in (None, "/../../x"):
        other = client.create_model_version(NAME, source=source, run_id=run_id)
        client.set_registered_model_alias(NAME, CHAMPION, other.version)
        with pytest.raises(WrongInput, match=f"photos version {other.version} names the MLflow run"):
            champion(storage)
    assert [table.table_id for table in trained_versions(storage)] == ["photos"]
    client.set_registered_model_alias(NAME, CHAMPION, "1")
    bad = {"lakevision.table_version": "x", "test_accuracy": "nan", "lakevision.test_images": "\u0663"}
    models.tag_version(storage, made, bad)
    assert [table.table_id for table in trained_versions(storage)] == ["photos"]  # by the table it serves
    better = log_run(storage, tmp_path, seed=2, accuracy=0.9)
    assert promote_best([better], NAMED, storage).outcome == "promoted"


def test_champion_of_another_table_is_rejected_and_derived_names_differ(storage, tmp_path):
    """A name that a user gives to models of two tables is rejected; names derived from the source are distinct."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    promote_best([run], NAMED, storage)
    other = PHOTOS.model_copy(update={"table_id": "dogs", "path": "/tables/dogs/images", "source": "/data/dogs"})
    theirs = log_run(storage, tmp_path, seed=2, accuracy=0.9, table=other, content="dogs")
    message = r"champion of the registered model 'photos' was trained on another table \('/tables/photos/images'\)"
    with pytest.raises(WrongInput, match=message):
        promote_best([theirs], NAMED, storage)
    with pytest.raises(WrongInput, match="which were trained on different tables"):
        promote_best([run, theirs], PromoteConfig(), storage)
    names = [promote_best([one], PromoteConfig(), storage).champion.name for one in (run, theirs)]
    assert names == ["lakevision-photos", "lakevision-dogs"]
    # A table that was created again has the same name. Another folder of this name, and a model of an earlier release,
    # have the longer one.
    again = PHOTOS.model_copy(update={"table_id": "again"})
    assert models.derived_model_name(again, storage) == "lakevision-photos"
    elsewhere = PHOTOS.model_copy(update={"source": "/mnt/photos"})
    assert models.derived_model_name(elsewhere, storage) == models.model_names(elsewhere, storage)[1]
    earlier = models.model_names(again, storage)[1]
    client_of(storage).create_registered_model(earlier)
    assert models.derived_model_name(again, storage) == earlier


def test_name_with_the_champion_of_another_table_is_rejected_before_training(source, storage, tmp_path):
    """A name whose champion is of a table with the same content is accepted."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")  # its content digest is "content"
    other = PHOTOS.model_copy(update={"table_id": "dogs", "path": "/tables/dogs/images"})
    check_promotion(NAMED, storage, other, cache)
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], NAMED, storage)
    check_promotion(NAMED, storage, other, cache)
    # Set by hand: without their table, no run could replace the champion.
    older = log_run(storage, tmp_path, seed=2, accuracy=0.6, content="older")
    models.set_alias(storage, models.register_run(storage, older, NAME), CHAMPION)
    with pytest.raises(WrongInput, match="set promote.model_name to another name"):
        check_promotion(NAMED, storage, other, cache)
    check_promotion(PromoteConfig(), storage, other, cache)


def test_champion_whose_run_was_purged_is_compared_by_its_tags(storage, tmp_path, cache):
    """After `mlflow gc` removed the champion's run, promotion works, and the DAG ends with its summary."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.8)
    before = promote_best([run], NAMED, storage).champion
    mlflow.MlflowClient(tracking_uri=storage.tracking).delete_run(run.run_id)
    mlflow.tracking._tracking_service.utils._get_store(storage.tracking)._hard_delete_run(run.run_id)
    kept = promote_best([log_run(storage, tmp_path, seed=2, accuracy=0.7)], NAMED, storage)
    assert (kept.outcome, kept.champion, kept.champion_accuracy) == ("kept", before, 0.8)
    etl = EtlReport(
        images=PHOTOS, files=PHOTOS, stored=60, duplicates=0, quarantined=0, read=0, changed=False, classes={}
    )
    predictions = PredictReport(predictions=PHOTOS, model=before, predicted=0, errors=0, seconds=0.0)
    summary = make_summary(storage, etl, cache, Verdict(line="none"), None, None, before, predictions, {}, {})
    assert (summary.version, summary.test_accuracy) == (before.version, 0.8)
    assert read_artifact(storage, run, MODEL_CARD_FILE) is None


def test_runs_of_another_program_are_no_candidates(storage, tmp_path):
    """A user's own run in the experiment, with a `test_accuracy`, is neither promoted nor repeated."""
    with pytest.raises(WrongInput, match="has no finished training run: run the flow train first"):
        promote_best([], PromoteConfig(), storage)
    client, experiment = client_of(storage), prepare_tracking(storage)

    def log_foreign() -> str:
        run_id = client.create_run(experiment).info.run_id
        client.log_metric(run_id, "test_accuracy", 0.99)
        client.set_terminated(run_id)
        return str(run_id)

    foreign = log_foreign()
    assert promotable_runs(storage) == []
    with pytest.raises(WrongInput, match="has no finished training run"):
        newest_training(storage)
    with pytest.raises(WrongInput, match="which is not a training run"):
        logged_training(storage, foreign)
    run = log_run(storage, tmp_path, seed=1, accuracy=0.8)
    log_foreign()
    assert promotable_runs(storage) == [run]
    assert newest_training(storage) == run
    assert promote_best([], PromoteConfig(), storage).challenger == run


def test_decision_is_shown_in_the_flow_run(prefect_harness, storage, tmp_path):
    """The flow run has an artifact with both accuracies, a link to the registry and a state Kept, and continues."""
    first = log_run(storage, tmp_path, seed=1, accuracy=0.9)
    worse = log_run(storage, tmp_path, seed=2, accuracy=0.36)
    stages = StageLog()

    @flow
    def promote_both() -> list[ModelRef]:
        return [stages.run(promote_run, [run], NAMED, storage, SparkConfig()) for run in (first, worse)]

    state = promote_both(return_state=True)
    assert state.result() == [champion(storage)] * 2
    assert stages.skipped == {"promote": False}
    flow_run_id = state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter.model_validate({"flow_run_id": {"any_": [flow_run_id]}})
        )
        tasks = client.read_task_runs()
    shown = [str(artifact.data) for artifact in found if artifact.key == "promotion"]
    assert any(text.startswith("## Promoted") and "0.9000 | 10 |" in text for text in shown)
    kept = next(text for text in shown if text.startswith("## Kept"))
    assert "photos version 1 stays the champion" in kept
    assert "| best run | 0.3600 | 10 |" in kept
    assert "| previous champion | 0.9000 | 10 |" in kept
    link = next(artifact for artifact in found if artifact.key == "champion")
    assert "/#/models/photos/versions/1" in str(link.data)
    assert "MLflow's model registry" in link.description
    assert {task.state_name for task in tasks if task.flow_run_id == flow_run_id} == {"Completed", "Kept"}
    # A reason for the given run replaces a champion that was deleted.
    mlflow.MlflowClient(tracking_uri=storage.tracking).delete_model_version(NAME, "1")
    given = {"run_ids": [worse.run_id], "reason": "deleted by mistake"}
    settings = {"promote": {"model_name": NAME}, "storage": {"home": storage.home}}
    assert promote(PromoteRun.model_validate(given | settings)).run_id == worse.run_id


def test_run_is_chosen_by_val_and_compared_by_test(storage, tmp_path):
    """The higher test accuracy of another run does not count; the reason has the cross-validation of the run."""
    lucky = log_run(storage, tmp_path, seed=1, accuracy=0.9, val_accuracy=0.6)
    better = log_run(storage, tmp_path, seed=2, accuracy=0.8, val_accuracy=0.7)
    for name, value in zip(FOLDS_METRICS, (0.7, 0.65, 0.75), strict=True):
        client_of(storage).log_metric(better.run_id, name, value)
    promoted = promote_best([lucky, better], NAMED, storage)
    assert (promoted.champion.run_id, promoted.challenger_accuracy) == (better.run_id, 0.8)
    assert promoted.reason.endswith("; its head has 0.7000 (0.6500 to 0.7500) in a cross-validation")
    tags = models.version_tags(storage, promoted.champion)
    assert json.loads(tags["candidates"]) == {lucky.run_id: 0.6, better.run_id: 0.7}
    assert promote_best([lucky], NAMED, storage).champion.run_id == lucky.run_id


def test_version_that_predicts_no_image_in_a_fresh_process_is_not_promoted(storage, tmp_path, monkeypatch):
    """Its files are those that were registered, but its weights are not finite; the champion stays."""
    monkeypatch.setattr(
        "tasks.registry.aliases.predict_once", predict_once
    )  # The tests' own predicts in their process.
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], NAMED, storage)
    broken = log_run(storage, tmp_path, seed=2, accuracy=0.9, finite=False)
    refused = (
        "photos version 2, .*, does not predict an image .*the prediction of a gray image is .*promote another run"
    )
    with pytest.raises(WrongInput, match=refused):
        promote_best([broken], NAMED, storage)
    assert champion(storage).version == 1


def test_trial_is_a_candidate_once_its_settings_were_chosen(storage, tmp_path):
    """As a search does at its end with those of its best trial."""
    trials = [log_run(storage, tmp_path, seed, accuracy=0.5 + seed / 10) for seed in (1, 2)]
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    search = client.create_run(client.get_run(trials[0].run_id).info.experiment_id).info.run_id
    for number, run in enumerate(trials):
        for tag, value in trial_tags(search, number).items():
            client.set_tag(run.run_id, tag, value)
    assert promotable_runs(storage) == []
    mark_chosen(storage, trials[0])
    assert promotable_runs(storage) == trials[:1]
    other = log_run(storage, tmp_path, seed=3, accuracy=0.4)
    assert promotable_runs(storage) == [other, trials[0]]


def test_candidates_without_run_ids_are_those_of_the_chosen_tables(storage, tmp_path, source):
    """The newest run of the home may be on another table; a table without a run is refused, not replaced."""
    other = resolve_storage(StorageConfig(home=storage.home, tables="other-tables"))
    elsewhere = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    assert promotable_runs(storage) == [elsewhere]
    for tables in (storage, other):
        ingest_images(EtlConfig(source=str(source)), tables, SparkConfig())
    own = log_run(storage, tmp_path, seed=2, accuracy=0.6)
    with pytest.raises(WrongInput, match="'.*/other-tables/images'") as refused:
        promote_best([], NAMED, other)
    assert refused.value.setting == "run_ids"
    of_other = log_run(other, tmp_path, seed=3, accuracy=0.7)
    assert promote_best([], NAMED, storage).champion.run_id == own.run_id
    # By its id, where the folder was moved.
    moved = resolve_storage(StorageConfig(home=storage.home, tables="moved-tables"))
    Path(other.tables).rename(moved.tables)
    assert promotable_runs(moved, newest_snapshot(None, moved.table("images")).table) == [of_other]


def aliases(storage) -> tuple[int | None, int | None]:
    """Return the numbers of the versions with the aliases `champion` and `previous`."""
    found = (models.model_with_alias(storage, NAME, alias) for alias in (CHAMPION, PREVIOUS))
    return tuple(None if version is None else version.version for version in found)


def test_rollback_goes_back_one_version_and_its_run_is_not_promoted_again(storage, tmp_path, messages_of, caplog):
    """Neither the run that was rolled back nor a list of runs that has it brings it back; a better run is promoted."""
    caplog.set_level("INFO", "lakevision")
    rollback = RollbackConfig(model_name=NAME, reason="wrong labels")
    with pytest.raises(WrongInput, match="the registered model 'photos' has no champion"):
        roll_back(rollback, storage)
    first, second, third = (log_run(storage, tmp_path, seed, accuracy=0.1 + 0.3 * seed) for seed in (1, 2, 3))
    promote_best([first], NAMED, storage)
    assert aliases(storage) == (1, None)
    with pytest.raises(WrongInput, match="photos version 1 has no previous champion"):
        roll_back(rollback, storage)
    promote_best([second], NAMED, storage)
    assert aliases(storage) == (2, 1)

    done = roll_back(rollback, storage)

    assert (done.champion.version, done.rolled_back.version) == (1, 2)
    assert done.sentence == "photos version 2 was rolled back to version 1: wrong labels"
    assert done.sentence in messages_of("lakevision.registry")
    assert aliases(storage) == (1, None)
    kept = promote_best([second], NAMED, storage)
    assert (kept.outcome, kept.champion.version) == ("kept", 1)
    assert f"run {second.run_id} is not promoted again, since {done.sentence}" in kept.reason
    assert promote_best([first, second], NAMED, storage).outcome == "unchanged"
    assert promote_best([third, second], NAMED, storage).champion.run_id == third.run_id
    assert aliases(storage) == (3, 1)


def test_rollback_is_finished_by_the_next_one_after_a_kill(storage, tmp_path, monkeypatch):
    """Killed before the alias moves, the champion is as before; the alias `previous` is repaired by a promotion."""
    runs = [log_run(storage, tmp_path, seed, accuracy=0.5 + seed / 10) for seed in (1, 2)]
    for run in runs:
        promote_best([run], NAMED, storage)
    with monkeypatch.context() as killed:
        killed.setattr("tasks.tracking.models.set_alias", lambda *_arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            roll_back(RollbackConfig(model_name=NAME), storage)
    assert aliases(storage) == (2, None)
    assert promote_best(runs[1:], NAMED, storage).outcome == "unchanged"
    assert aliases(storage) == (2, 1)
    assert roll_back(RollbackConfig(model_name=NAME), storage).champion.version == 1
    assert aliases(storage) == (1, None)


def decisions(storage) -> list[dict]:
    """Return the rows of the table `promotions`, the oldest first."""
    rows = deltalake.DeltaTable(storage.table("promotions")).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["decided_at"])


def test_every_decision_is_a_row(storage, tmp_path):
    """A promotion, a run that loses, and a rollback, but not a run that is the champion already."""
    runs = [log_run(storage, tmp_path, seed, accuracy=0.5 + seed / 10) for seed in (1, 2)]
    worse = log_run(storage, tmp_path, 3, accuracy=0.3)
    for run in (*runs, worse, runs[1]):
        promote_best([run], NAMED, storage)
    roll_back(RollbackConfig(model_name=NAME, reason="wrong labels"), storage)
    names = ("decision", "from_version", "to_version", "run_id", "challenger_accuracy", "champion_accuracy", "images")
    assert [tuple(row[name] for name in names) for row in decisions(storage)] == [
        ("promoted", None, 1, runs[0].run_id, 0.6, None, 10),
        ("promoted", 1, 2, runs[1].run_id, 0.7, 0.6, 10),
        ("kept", 2, 2, worse.run_id, 0.3, 0.7, 10),
        ("rolled back", 2, 1, runs[0].run_id, None, None, None),
    ]
    assert {row["model_name"] for row in decisions(storage)} == {NAME}
    assert decisions(storage)[-1]["reason"] == "wrong labels"
    # The model card in the registry begins with it.
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert client.get_model_version(NAME, "2").description.startswith(
        "## Promotion\n\nphotos version 2 is the champion"
    )


def test_run_waits_until_a_user_has_answered(storage, tmp_path):
    """It is registered meanwhile; an answer counts only for the champion that the question was about."""
    first, second = (log_run(storage, tmp_path, seed, accuracy=0.5 + seed / 10) for seed in (1, 2))
    human = NAMED.model_copy(update={"approval": "human"})
    refused = Approval(approved=False, by="reviewer", comment="too early", champion_version=None)
    approved = refused.model_copy(update={"approved": True, "comment": ""})

    waiting = promote_best([first], human, storage)
    assert (waiting.outcome, waiting.champion.version, waiting.previous) == ("waiting", 1, None)
    assert waiting.sentence.startswith("photos version 1 waits for an approval: test accuracy 0.6000")
    assert aliases(storage) == (None, None)
    assert models.model_with_alias(storage, NAME, CHALLENGER) == waiting.champion
    with pytest.raises(WrongInput, match="'photos' has no champion, .*reviewer: too early"):
        promote_best([first], human, storage, approval=refused)
    made = promote_best([first], human, storage, approval=approved)
    assert (made.outcome, made.approved_by) == ("promoted", "reviewer")
    assert made.reason.endswith("without a previous champion; approved by reviewer")
    assert models.model_with_alias(storage, NAME, CHALLENGER) is None

    assert promote_best([second], human, storage).outcome == "waiting"
    assert aliases(storage) == (1, None)
    stale = promote_best([second], human, storage, approval=approved)
    assert (stale.outcome, stale.champion) == ("kept", made.champion)
    assert "was asked when the model had no champion, which has changed since then: promote it again" in stale.reason
    kept = promote_best([second], human, storage, approval=refused.model_copy(update={"champion_version": 1}))
    assert (kept.outcome, kept.champion) == ("kept", made.champion)
    done = promote_best([second], human, storage, approval=approved.model_copy(update={"champion_version": 1}))
    assert (done.outcome, done.champion.version) == ("promoted", 2)
    assert aliases(storage) == (2, 1)
    worse = log_run(storage, tmp_path, 3, accuracy=0.3)
    assert promote_best([worse], human, storage).outcome == "kept"
    names = ("decision", "from_version", "to_version", "approved_by")
    assert [tuple(row[name] for name in names) for row in decisions(storage)] == [
        ("kept", None, None, "reviewer"),
        ("promoted", None, 1, "reviewer"),
        ("kept", 1, 1, "reviewer"),
        ("kept", 1, 1, "reviewer"),
        ("promoted", 1, 2, "reviewer"),
        ("kept", 2, 2, None),
    ]


@pytest.mark.parametrize("last", ["run", "rollback"])
def test_decision_that_a_kill_kept_from_the_table_is_appended_once(storage, tmp_path, monkeypatch, last):
    """By the next promotion or rollback, after the alias has moved; an invalid tag is ignored."""
    runs = [log_run(storage, tmp_path, seed, accuracy=0.5 + seed / 10) for seed in (1, 2)]
    promote_best(runs[:1], NAMED, storage)
    with monkeypatch.context() as killed:
        killed.setattr(promote_module, "record", lambda *_arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            promote_best(runs[1:], NAMED, storage)
    assert champion(storage).run_id == runs[1].run_id
    assert len(decisions(storage)) == 1
    if last == "run":
        for _ in range(2):
            assert promote_best(runs[1:], NAMED, storage).outcome == "unchanged"
    else:
        roll_back(RollbackConfig(model_name=NAME), storage)
    expected = [("promoted", 1), ("promoted", 2), ("rolled back", 1)]
    assert [(row["decision"], row["to_version"]) for row in decisions(storage)] == expected[: 2 + (last != "run")]
    models.tag_version(storage, champion(storage), {"lakevision.decision": "{}"})
    assert promote_best([RunRef(run_id=champion(storage).run_id)], NAMED, storage).outcome == "unchanged"


def test_rollback_to_a_version_that_cannot_be_loaded_changes_nothing(storage, tmp_path):
    """The files of the previous champion are checked before the alias moves."""
    runs = [log_run(storage, tmp_path, seed, accuracy=0.5 + seed / 10) for seed in (1, 2)]
    for run in runs:
        promote_best([run], NAMED, storage)
    for file in Path(storage.home).rglob("weights.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WrongInput, match="photos version 1"):
        roll_back(RollbackConfig(model_name=NAME), storage)
    assert aliases(storage) == (2, 1)


def test_rollback_of_a_table_in_a_flow_is_an_artifact(prefect_harness, source, storage, tmp_path, monkeypatch):
    """Without a name it is the model of the table `images`, and the artifact has the sentence."""
    monkeypatch.setenv("LAKEVISION_HOME", storage.home)
    ingest_images(EtlConfig(source=str(source)), storage, SparkConfig())
    any_figures = PromoteConfig(min_accuracy_gain=-1.0, max_recall_drop=1.0)
    for seed in (1, 2):
        champion = promote_best([log_run(storage, tmp_path, seed, 0.5 + seed / 10)], any_figures, storage).champion

    found = rollback(RollbackRun.model_validate({"reason": "why not", "storage": {"home": storage.home}}))

    assert found == champion.model_copy(update={"version": 1, "run_id": found.run_id})
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(
            artifact_filter=ArtifactFilter.model_validate({"key": {"any_": ["rollback"]}})
        )
    assert f"{champion.name} version 2 was rolled back to version 1: why not" in str(artifact.data).replace("\\", "")
