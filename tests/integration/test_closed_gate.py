"""The promotion gate without evidence: the champion stays, and the reason says what replaces it all the same."""

import hashlib
import sqlite3
import unicodedata
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import mlflow
import pyarrow as pa
import pytest

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig, RollbackConfig
from tasks.errors import WrongInput
from tasks.model_package.classifier import ImageClassifier
from tasks.predict.champion import named_model
from tasks.refs import ModelRef, RunRef, TableRef
from tasks.registry.aliases import CHAMPION
from tasks.registry.decision import Approval
from tasks.registry.promote import promote_best
from tasks.registry.rollback import roll_back
from tasks.schema import PREDICTIONS_ARROW
from tasks.tables.snapshots import newest_snapshot
from tasks.tracking.classifier_files import fetch_registered
from tasks.tracking.models import model_with_alias
from tasks.tracking.server import database_file
from tests.builders.delta_rows import delta_rows
from tests.builders.untrained_model import log_run

NAME = "photos"
NAMED = PromoteConfig(model_name=NAME)
HUMAN = NAMED.model_copy(update={"approval": "human"})
ANY_FIGURES = PromoteConfig(model_name=NAME, min_accuracy_gain=-1.0, max_recall_drop=1.0)
CAFE = "Caf\u00e9"


def champion(storage) -> ModelRef | None:
    """Return the version with the alias `champion`."""
    return model_with_alias(storage, NAME, CHAMPION)


def stored_bytes(file: Path) -> bytes:
    """Return bytes of an image that are not those of its file, as of an image that was scaled down."""
    return file.with_name("001.png" if file.name == "000.png" else "000.png").read_bytes()


def write_scaled(storage, source) -> TableRef:
    """Write a table of 20 test images whose stored bytes are not those of their files, and 4 of train."""
    files = sorted(source.glob("*/*.png"))[::2][:24]
    rows = {
        "sha256": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "label": [file.parent.name for file in files],
        "content": [stored_bytes(file) for file in files],
        "split": ["test"] * 20 + ["train"] * 4,
    }
    deltalake.write_deltalake(storage.table("images"), pa.table(rows), mode="overwrite")
    return newest_snapshot(None, storage.table("images")).table


def test_run_without_a_class_of_the_champion_does_not_replace_it(storage, tmp_path):
    """A class that is gone is an objection, also where a user decides or gives a reason; another spelling is not."""
    decomposed = unicodedata.normalize("NFD", CAFE)
    first = log_run(storage, tmp_path, 1, 0.1, classes=(CAFE, "dog", "fox"))
    fewer = log_run(storage, tmp_path, 2, 0.9, classes=("dog", CAFE))
    spelt = log_run(storage, tmp_path, 3, 1.0, classes=("dog", decomposed, "wolf"))
    before = promote_best([first], NAMED, storage).champion
    for settings, reason in ((NAMED, ""), (HUMAN, ""), (NAMED, "no foxes any more")):
        kept = promote_best([fewer], settings, storage, reason=reason)
        assert (kept.outcome, champion(storage)) == ("kept", before)
        assert "it has no class 'fox', which the champion has (set promote.allow_fewer_classes" in kept.reason
    allowed = PromoteConfig(model_name=NAME, allow_fewer_classes=True)
    assert promote_best([fewer], allowed, storage).outcome == "promoted"
    assert promote_best([spelt], ANY_FIGURES, storage).outcome == "promoted"
    # The gate is not for rollbacks.
    assert roll_back(RollbackConfig(model_name=NAME), storage).champion.run_id == fewer.run_id


@pytest.mark.parametrize("way", ["user", "run id"])
def test_champion_whose_version_was_deleted_is_missed(storage, tmp_path, way):
    """MLflow deletes its alias, too; the next run is not taken for the first one, until a user says so.

    An alias that another program left without its version is named as the reason why nothing can be predicted.
    """
    made = promote_best([log_run(storage, tmp_path, 1, 0.8)], NAMED, storage).champion
    mlflow.MlflowClient(tracking_uri=storage.tracking).delete_model_version(NAME, str(made.version))
    with pytest.raises(WrongInput, match="'photos' has no version with the alias 'champion': run the flow promote"):
        named_model(PredictConfig(), NAMED, storage)
    if way == "user":
        with closing(sqlite3.connect(database_file(storage))) as database, database:
            row = ("photos", "champion", made.version)
            database.execute("INSERT INTO registered_model_aliases (name, alias, version) VALUES (?, ?, ?)", row)
        with pytest.raises(WrongInput, match="alias 'champion' .* names a version that was deleted") as refused:
            named_model(PredictConfig(), NAMED, storage)
        assert str(refused.value).endswith("or give another promote.model_name or predict.alias")
    run = log_run(storage, tmp_path, 2, 0.1)
    with pytest.raises(WrongInput, match="'photos' has no champion, and no run became it") as refused:
        promote_best([run], NAMED, storage)
    lost = "version 1 of 'photos' was the champion, but has the alias no longer or was deleted (give a version the"
    assert lost in str(refused.value)
    assert str(refused.value).endswith(
        "to replace it without a comparison, set promote.replace_unusable, set promote.approval to human, or run the "
        f"flow promote with run_ids ['{run.run_id}'] and a reason"
    )
    assert champion(storage) is None
    if way == "user":
        assert promote_best([run], HUMAN, storage).outcome == "waiting"
        answer = Approval(approved=True, by="reviewer", comment="seen", champion_version=None)
        replaced = promote_best([run], HUMAN, storage, approval=answer)
        assert replaced.reason.endswith(
            f"only the limits of a run counted: {lost} alias in MLflow if one is left); approved by reviewer: seen"
        )
    else:
        replaced = promote_best([run], NAMED, storage, reason="it was of another project")
        assert replaced.reason.endswith(
            f"{lost} alias in MLflow if one is left); it is replaced, since it was of another project"
        )
    assert (replaced.outcome, champion(storage).run_id) == ("promoted", run.run_id)


def test_error_that_may_pass_and_a_wrong_setting_replace_no_champion(source, storage, tmp_path, monkeypatch):
    """The first ends the run, which is retried; the second is the user's. Neither makes the champion unusable."""
    table = write_scaled(storage, source)
    first = log_run(storage, tmp_path, 1, 0.5, table=table, classes=("blue", "red", "unsure"))
    before = promote_best([first], NAMED, storage).champion
    run = log_run(storage, tmp_path, 2, 0.9, table=table)
    settings = ANY_FIGURES.model_copy(update={"replace_unusable": True, "allow_fewer_classes": True})
    fetch = fetch_registered

    def fail_for_champion(storage, model, *rest):
        if model == before:
            raise OSError(5, "Input/output error")
        return fetch(storage, model, *rest)

    with monkeypatch.context() as failing:
        failing.setattr("tasks.predict.champion.fetch_registered", fail_for_champion)
        with pytest.raises(OSError, match="Input/output error"):
            promote_best([run], settings, storage)
    with pytest.raises(WrongInput, match=r"predict\.min_probability is 0\.5, but 'unsure'"):
        promote_best([run], settings, storage, predict=PredictConfig(min_probability=0.5))
    assert champion(storage) == before


def test_each_challenger_of_the_same_images_counts_once(storage, tmp_path):
    """After others that lost, a small gain may be chance; the card says how many, also once runs are deleted."""
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.6)], NAMED, storage)
    loser = log_run(storage, tmp_path, seed=2, accuracy=0.5)
    small = log_run(storage, tmp_path, seed=3, accuracy=0.7)
    for _ in range(2):
        assert "these images have judged 1 challenger of this model" in promote_best([loser], NAMED, storage).reason
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    client.delete_run(loser.run_id)
    for _ in range(2):
        kept = promote_best([small], NAMED, storage)
        assert kept.outcome == "kept"
        # The two differ on at most 7 of 10 images: sqrt(2 * 7 * ln 2) / 10.
        assert "judged 2 challengers of this model; its gain of 0.1000 is not above 0.3115, which may be" in kept.reason
    made = promote_best([small], ANY_FIGURES, storage)
    assert made.outcome == "promoted"
    description = client.get_model_version(NAME, str(made.champion.version)).description
    assert "these images have judged 2 challengers of this model" in description


def test_images_that_were_added_do_not_start_the_count_anew(source, storage, tmp_path):
    """A test set of which most images are the same is the same."""
    table = write_scaled(storage, source)
    never = NAMED.model_copy(update={"min_accuracy_gain": 1.0})
    promote_best([log_run(storage, tmp_path, 1, 0.5, table=table)], NAMED, storage)
    assert promote_best([log_run(storage, tmp_path, 2, 0.5, table=table)], never, storage).comparison.num_judged == 1
    rows = deltalake.DeltaTable(table.path).to_pyarrow_table()
    grown = rows.set_column(rows.schema.get_field_index("split"), "split", pa.array(["test"] * 24))
    deltalake.write_deltalake(table.path, grown, mode="overwrite")
    newer = newest_snapshot(None, table.path).table
    later = promote_best([log_run(storage, tmp_path, 3, 0.5, table=newer, content="newer")], never, storage)
    assert (later.comparison.images, later.comparison.left_out, later.comparison.num_judged) == (20, 4, 2)


def test_both_models_are_judged_on_predictions_from_the_same_bytes(source, storage, tmp_path):
    """Rows that were predicted from the original files, or from unknown bytes, stay, and do not count."""
    table = write_scaled(storage, source)
    images = deltalake.DeltaTable(table.path).to_pyarrow_table().to_pylist()[:20]
    first = log_run(storage, tmp_path, 1, 0.5, table=table, classes=("blue", "fox", "red"))
    promote_best([first], NAMED, storage)
    # As by a run on predict.source: half of the rows name the bytes, those of the files; an older release named none.
    rows = [
        {
            "sha256": image["sha256"],
            "model_name": NAME,
            "model_version": 1,
            "label": image["label"],
            "top_labels": [image["label"]],
            "content_sha256": image["sha256"] if number % 2 else None,
            "predicted_at": datetime.now(UTC),
        }
        for number, image in enumerate(images)
    ]
    known = pa.Table.from_pylist(rows, PREDICTIONS_ARROW)
    deltalake.write_deltalake(storage.table("predictions"), known)
    found = ImageClassifier.load(tmp_path / "classifier-1").predict([image["content"] for image in images])
    right = sum(one.label == image["label"] for one, image in zip(found, images, strict=True)) / 20
    assert right < 1

    kept = [promote_best([log_run(storage, tmp_path, seed, 0.5, table=table)], ANY_FIGURES, storage) for seed in (2, 3)]

    for one in kept:
        assert (one.outcome, one.comparison.images) == ("kept", 20)
        assert one.comparison.champion_accuracy == right
        assert "it has no class 'fox'" in one.reason
    predicted = delta_rows(deltalake.DeltaTable(storage.table("predictions"))).to_pylist()
    own = {row["sha256"]: row["label"] for row in predicted if row["model_version"] == 1}
    assert own == {image["sha256"]: image["label"] for image in images}
    digests = {image["sha256"]: hashlib.sha256(image["content"]).hexdigest() for image in images}
    assert {row["sha256"]: row["content_sha256"] for row in predicted if row["model_version"] == 2} == digests
    # The class has no images; the other classes have at least five.
    few = promote_best([RunRef(run_id=kept[1].challenger.run_id)], NAMED, storage).reason
    assert "too few images to judge the recall of 'fox' (0)" in few
