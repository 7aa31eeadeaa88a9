"""Trainings as a person sets them, interrupted at chosen steps and resumed: they end like one that never stopped."""

import shutil
from pathlib import Path

import mlflow
import pytest

from tasks import tracking
from tasks.config.train import AugmentationConfig, FineTunePhase
from tasks.errors import WrongInput
from tasks.train.checkpoint import Checkpoints
from tasks.train.identity import run_key
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.fakes.interrupted_training import (
    STEPS,
    CountingRank,
    Ground,
    Interruption,
    check_resumed,
    coloured_cache,
    logged_metrics,
    make_ground,
)
from tests.fakes.small_training import Killed

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Ground:
    """Return what all trainings here share; features that one has made the next one finds."""
    return make_ground(tmp_path_factory.mktemp("resumed"), empty_tracking)


def test_a_head_on_features_goes_on_within_an_epoch_and_within_its_validation(ground, tmp_path):
    """The mode that nothing has to be set for: what a checkpoint holds is the head."""
    train = ground.settings(max_epochs=3)
    interruptions = [
        Interruption("asked", 11, leaves=(0, 1, 18)),
        Interruption("asked in validation", 5, leaves=(0, 1, 45)),
        Interruption("killed", 4, leaves=(0, 2, 0), repeated=4),
    ]
    run, _rank = check_resumed(ground, train, interruptions, tmp_path)

    losses = [loss for _step, loss in logged_metrics(ground.unbroken, run)["train_loss"]]
    assert losses == sorted(set(losses), reverse=True), "it learns something in each epoch"


def test_a_later_stage_goes_on_at_its_border_after_its_first_step_and_in_its_last_epoch(ground, tmp_path):
    """It begins with the best weights of the stage before, also in a process that did not train that one."""
    train = ground.settings(
        max_epochs=2,
        # The head learns next to nothing, so that the best weights, which are logged, are of the stage after.
        learning_rate=1e-5,
        fine_tune=[FineTunePhase(unfreeze_from="conv5", learning_rate=1e-3, max_epochs=2)],
    )
    interruptions = [
        Interruption("killed", 2 * STEPS + 1, leaves=(0, 2, 0), repeated=1),
        Interruption("asked", 1, leaves=(1, 2, 6)),
        Interruption("asked", STEPS + 2, leaves=(1, 3, 18)),
    ]
    run, _rank = check_resumed(ground, train, interruptions, tmp_path)

    assert tracking.run_metrics(ground.unbroken, run)["best_epoch"] >= 2


def test_the_whole_network_on_augmented_images_goes_on_with_the_same_images(ground, tmp_path):
    """Crops, flips and what is blended with what are drawn anew in each step, whichever process takes it."""
    train = ground.settings(
        weights="none",
        freeze_backbone=False,
        max_epochs=3,
        augmentation=AugmentationConfig(flip=True, resized_crop=0.5, mixup=0.4),
    )
    interruptions = [
        Interruption("asked", 11, leaves=(0, 1, 18)),
        Interruption("killed", 5 + 3, leaves=(0, 2, 0), repeated=3),
    ]
    check_resumed(ground, train, interruptions, tmp_path)


def test_a_learning_rate_that_fell_on_a_plateau_is_the_same_afterwards(ground, tmp_path):
    """It is counted from the epochs of all starts; nothing here is enough of an improvement."""
    train = ground.settings(max_epochs=4, schedule="plateau", plateau_epochs=1, min_delta=10.0)
    interruptions = [
        Interruption("asked", 2 * STEPS + 3, leaves=(0, 2, 18)),
        Interruption("killed", 5 + 2, leaves=(0, 3, 0), repeated=2),
    ]
    run, _rank = check_resumed(ground, train, interruptions, tmp_path)

    rates = [rate for _step, rate in logged_metrics(ground.unbroken, run)["learning_rate"]]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5])


def test_a_learning_rate_of_one_cycle_goes_on_while_it_rises_and_while_it_falls(ground, tmp_path):
    """It is a function of the step, counted over all starts."""
    train = ground.settings(max_epochs=3, schedule="one_cycle")
    interruptions = [
        Interruption("asked", 5, leaves=(0, 0, 30)),
        Interruption("killed", 3 + STEPS + 2, leaves=(0, 2, 0), repeated=2),
    ]
    check_resumed(ground, train, interruptions, tmp_path)


def test_a_batch_size_that_was_chosen_stays_where_another_would_be_chosen_now(ground, tmp_path, monkeypatch):
    """The process that goes on has less memory; the order of the images stays."""
    train = ground.settings(max_epochs=2, batch_size="auto")
    steps = 23  # of 2 of 45 images: the largest power of two that leaves an epoch 20 steps

    largest = iter([1024, 1024, 1])

    def make_rank(interruption):
        monkeypatch.setattr("tasks.model.precision.MAX_AUTO_BATCH", next(largest))
        return CountingRank(interruption)

    run, rank = check_resumed(ground, train, [Interruption("asked", steps + 7, leaves=(0, 1, 14))], tmp_path, make_rank)

    assert rank.steps == 2 * steps
    tags = mlflow.MlflowClient(tracking_uri=ground.unbroken.tracking).get_run(run.run_id).data.tags
    assert tags[f"{tracking.BATCH_SIZE_TAG}0"] == "2"


def test_a_checkpoint_of_another_training_is_refused_by_name_of_what_differs(ground, tmp_path):
    """As somebody copied it; its MLflow run is left as it is, and without it the training begins anew."""
    storage = ground.interrupted
    ours, theirs = ground.settings(max_epochs=1, seed=5), ground.settings(max_epochs=2, seed=6)
    other = coloured_cache(f"{tmp_path}/other", classes=("blue", "gold"))
    with pytest.raises(Killed):
        train_model(
            TrainingSpec(train=theirs, cache=other, storage=storage),
            reducer=CountingRank(Interruption("killed", STEPS + 1, (0, 1, 0))),
        )
    folders = [
        storage.checkpoints / run_key(train, cache, None) for train, cache in ((theirs, other), (ours, ground.cache))
    ]
    shutil.copytree(*folders)
    _name, their_run = Checkpoints(folders[0], keep=2, config={}).newest()
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    before = client.get_run(their_run).to_dictionary()

    with pytest.raises(WrongInput) as refused:
        train_model(TrainingSpec(train=ours, cache=ground.cache, storage=storage))

    assert str(refused.value) == (
        f"the checkpoint in '{folders[1]}' is of another training (classes only there: gold; classes only here: green, "
        f"red; cache is '{other.digest}' there and '{ground.cache.digest}' here; "
        "train.max_epochs is 2 there and 1 here; train.seed is 6 there and 5 here): train with its data and settings, "
        "or remove the files of that folder to begin anew"
    )
    assert client.get_run(their_run).to_dictionary() == before
    shutil.rmtree(folders[1])
    epochs = []
    run = train_model(
        TrainingSpec(train=ours, cache=ground.cache, storage=storage),
        on_epoch=lambda metrics: epochs.append(metrics.epoch),
    )
    assert epochs == [0]
    assert run.run_id != their_run
