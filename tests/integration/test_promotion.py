"""Promotion on a real registry: the champion is the best there was, and never goes back."""

import mlflow
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter

from tasks import tracking
from tasks.config import PromoteConfig
from tasks.errors import WrongInput
from tasks.orchestration.task import StageLog
from tasks.predict.model import ImageClassifier
from tasks.refs import ModelRef
from tasks.registry.promote import CHAMPION, check_promotion, promote_best
from tasks.registry.task import promote_run
from tests.integration.hand_made import SIDE, hand_made_cache
from tests.integration.untrained import PHOTOS, log_run

NAME = "photos"
NAMED = PromoteConfig(model_name=NAME)


def champion(storage, name: str = NAME) -> ModelRef | None:
    """Return the version that the alias names."""
    return tracking.model_with_alias(storage, name, CHAMPION)


def test_a_worse_run_and_one_that_is_submitted_again_move_nothing(storage, tmp_path, said, caplog):
    """The champion of 0.90 stays one after 0.36, whoever promotes it again; equals and the gate change nothing."""
    caplog.set_level("INFO", "lakevision")
    first = log_run(storage, tmp_path, seed=1, accuracy=0.6)
    better = log_run(storage, tmp_path, seed=2, accuracy=0.9)
    worse = log_run(storage, tmp_path, seed=3, accuracy=0.36)
    equal = log_run(storage, tmp_path, seed=4, accuracy=0.9)
    assert promote_best([first], NAMED, storage).outcome == "promoted"
    made = promote_best([better], NAMED, storage)
    assert (made.outcome, made.champion_accuracy) == ("promoted", 0.6)
    tags = tracking.version_tags(storage, made.champion)
    assert (tags["previous_champion"], tags["test_accuracy"], tags["lakevision.table_id"]) == (
        "1",
        "0.900000",
        "photos",
    )
    for run in (worse, equal, first):
        kept = promote_best([run], NAMED, storage)
        assert (kept.outcome, kept.champion) == ("kept", made.champion)
        assert champion(storage) == made.champion
        assert tracking.version_tags(storage, made.champion)["lakevision.promotion"] == kept.sentence
        assert kept.sentence in said("lakevision.registry")
    assert "is version 1 already, which is older" in kept.reason
    # Runs that did not win are no versions: none of them keeps a version of the table from maintenance.
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert len(client.search_model_versions(f"name = '{NAME}'")) == 2
    assert promote_best([worse, better], NAMED, storage).outcome == "unchanged"
    assert promote_best([], NAMED, storage).champion == made.champion
    with pytest.raises(WrongInput, match="below promote.min_test_accuracy 0.95"):
        promote_best([worse], PromoteConfig(model_name=NAME, min_test_accuracy=0.95), storage)
    assert champion(storage) == made.champion


def test_a_champion_of_an_older_version_is_tested_again_on_the_same_images(source, storage, tmp_path):
    """Its recorded accuracy was of other images: measured again from the challenger's cache, it keeps or loses."""
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

    better = log_run(storage, tmp_path, seed=3, accuracy=right + 0.01, table=newer, content="newer", cache=cache)
    made = promote_best([better], NAMED, storage)
    assert (made.outcome, made.champion.run_id) == ("promoted", better.run_id)
    # And a run of the older version is no challenger, however good it was on that.
    older = log_run(storage, tmp_path, seed=4, accuracy=1.0, content="older")
    again = promote_best([older], NAMED, storage)
    assert (again.outcome, again.champion) == ("kept", made.champion)
    assert "was trained on version 3 of the table, and the champion on version 7" in again.reason


def test_where_it_cannot_be_tested_again_what_was_recorded_is_compared_and_said(source, storage, tmp_path):
    """Here the champion takes images of another size than the challenger's cache has."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")
    old = log_run(storage, tmp_path, seed=1, accuracy=0.8, content="older", image_size=48)
    promote_best([old], NAMED, storage)
    newer = PHOTOS.model_copy(update={"version": 7})
    run = log_run(storage, tmp_path, seed=2, accuracy=0.7, table=newer, content="newer", cache=cache)
    kept = promote_best([run], NAMED, storage)
    assert (kept.outcome, kept.champion_accuracy) == ("kept", 0.8)
    assert "could not be tested again: it takes images of 48 pixels and the cache's have 24" in kept.reason


def test_a_champion_of_another_table_is_refused_and_names_derived_from_the_source_never_meet(storage, tmp_path):
    """By a name that a user gave to both; before a training as well as after it."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.5)
    promote_best([run], NAMED, storage)
    other = PHOTOS.model_copy(update={"table_id": "dogs", "path": "/tables/dogs/images", "source": "/data/dogs"})
    theirs = log_run(storage, tmp_path, seed=2, accuracy=0.9, table=other, content="dogs")
    refused = r"champion of the registered model 'photos' was trained on another table \('/tables/photos/images'\)"
    with pytest.raises(WrongInput, match=refused):
        promote_best([theirs], NAMED, storage)
    with pytest.raises(WrongInput, match="which were trained on different tables"):
        promote_best([run, theirs], PromoteConfig(), storage)
    names = [promote_best([one], PromoteConfig(), storage).champion.name for one in (run, theirs)]
    assert [name.rpartition("-")[0] for name in names] == ["lakevision-photos", "lakevision-dogs"]


def test_a_name_with_the_champion_of_another_table_is_refused_before_training(source, storage, tmp_path):
    """And one with the champion of a table with the same content is not."""
    cache = hand_made_cache(source, f"{storage.cache}/by-hand")  # its content digest is "content"
    other = PHOTOS.model_copy(update={"table_id": "dogs", "path": "/tables/dogs/images"})
    check_promotion(NAMED, storage, other, cache)
    promote_best([log_run(storage, tmp_path, seed=1, accuracy=0.5)], NAMED, storage)
    check_promotion(NAMED, storage, other, cache)
    promote_best([log_run(storage, tmp_path, seed=2, accuracy=0.6, content="older")], NAMED, storage)
    promote_best([log_run(storage, tmp_path, seed=3, accuracy=0.7, content="older")], NAMED, storage)
    with pytest.raises(WrongInput, match="set promote.model_name to another name"):
        check_promotion(NAMED, storage, other, cache)
    check_promotion(PromoteConfig(), storage, other, cache)


def test_a_champion_whose_run_was_deleted_for_good_is_compared_by_its_tags(storage, tmp_path):
    """`mlflow gc` ends no promotion."""
    run = log_run(storage, tmp_path, seed=1, accuracy=0.8)
    before = promote_best([run], NAMED, storage).champion
    mlflow.MlflowClient(tracking_uri=storage.tracking).delete_run(run.run_id)
    mlflow.tracking._tracking_service.utils._get_store(storage.tracking)._hard_delete_run(run.run_id)
    kept = promote_best([log_run(storage, tmp_path, seed=2, accuracy=0.7)], NAMED, storage)
    assert (kept.outcome, kept.champion, kept.champion_accuracy) == ("kept", before, 0.8)


def test_the_decision_is_shown_in_the_run_and_the_stage_is_done(prefect_harness, storage, tmp_path):
    """As a Markdown artifact with both accuracies, a link in words, and a state called Kept; the champion goes on."""
    first = log_run(storage, tmp_path, seed=1, accuracy=0.9)
    worse = log_run(storage, tmp_path, seed=2, accuracy=0.36)
    stages = StageLog()

    @flow
    def promote_both() -> list[ModelRef]:
        return [stages.run(promote_run, [run], NAMED, storage) for run in (first, worse)]

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
    assert "| this run's | 0.3600 | 10 |" in kept
    assert "| the champion's before | 0.9000 | 10 |" in kept
    link = next(artifact for artifact in found if artifact.key == "champion")
    assert "/#/models/photos/versions/1" in str(link.data)
    assert "MLflow's model registry" in link.description
    assert {task.state_name for task in tasks if task.flow_run_id == flow_run_id} == {"Completed", "Kept"}
