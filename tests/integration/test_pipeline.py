"""The DAG with training in one process or with ranks, under Prefect's test harness."""

import shutil
from pathlib import Path

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from flows.pipeline import pipeline
from tasks.checks.preflight import check_pipeline
from tasks.config.pipeline import PipelineConfig
from tasks.errors import WrongInput
from tasks.refs import RunRef
from tasks.tables import snapshots
from tasks.tracking.models import model_with_alias
from tasks.tracking.runs import read_artifact
from tests.builders.other_mlflow import logged_by_others, open_run, state_of_mlflow

SETTINGS = {
    "model": "squeezenet1_1",
    "weights": "none",
    "freeze_backbone": False,
    "image_size": 32,
    "max_epochs": 1,
}


@pytest.fixture(autouse=True)
def _server(prefect_harness):
    """Run all tests of this module against the harness."""


def settings(storage, source, **others):
    """Return the settings of a short run of the DAG."""
    etl = {"source": str(source), "val_fraction": 0.2, "test_fraction": 0.2}
    return PipelineConfig.model_validate(
        {**SETTINGS, "etl": etl, "storage": {"home": storage.home}, "train": {"batch_size": 8}, **others}
    )


def published(key):
    """Return the newest artifact with a key."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])), sort=ArtifactSort.CREATED_DESC
        )
    return str(found[0].data)


def test_dag_that_trains_in_one_process_needs_no_pool(spark, storage, source, tmp_path, empty_tracking, monkeypatch):
    """By default the DAG trains once; a pool for ranks that the server does not have is not asked for.

    The caller has an open MLflow run, which is in no way part of the DAG. A run whose source has lost a class ends
    Failed, and changes nothing. A class with the name that inference gives uncertain images is refused before ETL.
    """
    config = settings(storage, source, distributed={"where": "work_pool", "work_pool": "nowhere"})
    with open_run(tmp_path / "theirs", empty_tracking, monkeypatch) as run:
        monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
        before, logged = state_of_mlflow(), logged_by_others(run)

        summary = pipeline(config)

        assert state_of_mlflow() == before
        assert logged_by_others(run) == logged
    assert summary.single is not None
    assert summary.distributed is None
    assert summary.test_accuracy == summary.single.test_accuracy
    assert list(summary.seconds) == ["preflight", "etl", "cache", "verdict", "train", "promote", "predict"]
    assert (summary.images, summary.predictions) == (60, 60)
    with pytest.raises(WrongInput, match="work_pool is 'nowhere'|distributed.deployment is"):
        pipeline(settings(storage, source, train_on="both", distributed=config.distributed.model_dump()))

    # The next night a class folder is not mounted: no table changes, and the champion stays.
    names = ("images", "files", "predictions")
    versions = [snapshots.latest(None, storage.table(name)).version for name in names]
    champion = model_with_alias(storage, summary.model, "champion")
    assert champion is not None
    (source / "red").rename(storage.home + "-elsewhere")
    state = pipeline(config, return_state=True)
    assert (state.type, state.name) == ("FAILED", "Failed")
    assert "'red' 20 of 20, more than etl.max_deleted_fraction 0.2 allows" in state.message
    assert [snapshots.latest(None, storage.table(name)).version for name in names] == versions
    assert model_with_alias(storage, summary.model, "champion") == champion
    Path(storage.home + "-elsewhere").rename(source / "unsure")
    caches = sorted(Path(storage.cache).iterdir())
    with pytest.raises(
        WrongInput, match="predict.min_probability is 0.6, but 'unsure' is a class of the model: give 0"
    ):
        pipeline(settings(storage, source, predict={"min_probability": 0.6}))
    (source / "unsure").rename(source / "unknown")
    with pytest.raises(WrongInput, match="predict.unknown_rate is 0.1, but 'unknown' is a class of the model: give 0"):
        pipeline(settings(storage, source, predict={"unknown_rate": 0.1}))
    assert [snapshots.latest(None, storage.table(name)).version for name in names] == versions
    assert sorted(Path(storage.cache).iterdir()) == caches


def test_dag_of_three_images_in_each_of_two_classes_ends_with_a_model_and_predictions(storage, make_images):
    """With the default fractions and batch size; one image fewer than the splits need is refused before a commit."""
    photos = make_images(per_class=3)
    shutil.rmtree(photos / "red")
    config = settings(storage, photos, train={}, etl={"source": str(photos)})

    summary = pipeline(config)

    assert (summary.images, summary.predictions, summary.prediction_errors) == (6, 6, 0)
    assert summary.cache_rows == {"train": 3, "val": 2, "test": 1}
    card = read_artifact(storage, RunRef(run_id=summary.single.run_id), "model_card.md").decode()
    assert "**The model was tested on few images (1):**" in card
    assert "3, lowered from 32: the split `train` has 3 images" in card
    pages = {key: published(key) for key in ("predictions", "summary", "champion-model-card")}
    for text in ("## Least sure", "data:image/jpeg;base64"):
        assert text in pages["predictions"]
    for key in ("summary", "champion-model-card"):
        for text in ("## Next commands", "flows.predict_batch", "Which images it gets wrong", "Learning curves"):
            assert text in pages[key], (key, text)

    few = storage.home + "-few"
    for file in sorted(photos.glob("*/*"))[1:4]:
        file.unlink()
    with pytest.raises(
        WrongInput, match="which has 3 images in 2 classes; training needs 4: .*: add 1 image$"
    ) as refused:
        pipeline(config.model_copy(update={"storage": config.storage.model_copy(update={"home": few})}))
    assert not [entry for entry in refused.traceback if "site-packages" in str(entry.path)]
    assert not list(Path(few).rglob("_delta_log"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_is_checked_where_the_training_happens(storage, source):
    """A DAG whose training is on a pool may ask for a GPU that this machine does not have."""
    config = settings(storage, source, train_on="distributed", device="cuda")

    check_pipeline(config, storage, trains_here=False)
    with pytest.raises(WrongInput, match="train.device is 'cuda' and torch sees no GPU"):
        check_pipeline(config, storage, trains_here=True)


def test_settings_of_ranks_that_do_not_train_are_warned_about(storage, source, messages_of):
    """The number of ranks alone does not let the DAG train with them."""
    check_pipeline(settings(storage, source, distributed={"num_ranks": 3}), storage)
    assert any("train_on is 'single'" in line for line in messages_of("lakevision.preflight"))


def test_batches_of_ranks_count_only_where_ranks_train(storage, source):
    """Sixty images, of which at most 36 are trained on, are enough for one process, and not for fifty ranks."""
    ranks = {"num_ranks": 50}
    check_pipeline(settings(storage, source, distributed=ranks), storage)
    with pytest.raises(WrongInput, match="num_ranks is 50, but the source has at most 36 images for"):
        check_pipeline(settings(storage, source, distributed=ranks, train_on="distributed"), storage)
