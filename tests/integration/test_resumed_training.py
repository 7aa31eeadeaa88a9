"""Training runs with common settings that are interrupted at chosen steps, then resumed."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlflow
import pytest
import torch

from tasks.config.augmentation import AugmentationConfig
from tasks.config.train import FineTunePhase
from tasks.errors import WrongInput
from tasks.refs import TEST, TRAIN, VAL, TableRef
from tasks.tracking.runs import BATCH_SIZE_TAG, CONTINUES_TAG, read_artifact, run_metrics
from tasks.train.checkpoint import Checkpoints
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec, run_key
from tests.fakes.interrupted_training import (
    STEPS,
    CountingRank,
    Interruption,
    Workspace,
    check_resumed,
    coloured_cache,
    logged_metrics,
    logged_weights,
    make_workspace,
)
from tests.fakes.small_training import Killed, same_tensors


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Workspace:
    """Return the workspace of all tests here, which also share cached features."""
    return make_workspace(tmp_path_factory.mktemp("resumed"), empty_tracking)


def test_head_on_cached_features_resumes_within_an_epoch_and_within_its_validation(workspace, tmp_path):
    """With the default settings, a checkpoint has the head alone."""
    train = workspace.settings(max_epochs=3)
    interruptions = [
        Interruption("terminated", 11, leaves=(0, 1, 18)),
        Interruption("terminated in validation", 5, leaves=(0, 1, 45)),
        Interruption("killed", 4, leaves=(0, 2, 0), repeated=4),
    ]
    run, _rank = check_resumed(workspace, train, interruptions, tmp_path)

    losses = [loss for _step, loss in logged_metrics(workspace.uninterrupted, run)["train_loss"]]
    assert losses == sorted(set(losses), reverse=True), "the loss must fall in each epoch"


def test_second_phase_resumes_at_its_start_after_its_first_step_and_in_its_last_epoch(workspace, tmp_path):
    """The phase starts with the best weights of the phase before, even in a process that did not train that phase."""
    train = workspace.settings(
        max_epochs=2,
        # The head hardly learns, so that the best weights, which are logged, are of the second phase.
        learning_rate=1e-5,
        fine_tune=[FineTunePhase(unfreeze_from="conv5", learning_rate=1e-3, max_epochs=2)],
    )
    interruptions = [
        Interruption("killed", 2 * STEPS + 1, leaves=(0, 2, 0), repeated=1),
        Interruption("terminated", 1, leaves=(1, 2, 6)),
        Interruption("terminated", STEPS + 2, leaves=(1, 3, 18)),
    ]
    run, _rank = check_resumed(workspace, train, interruptions, tmp_path)

    assert run_metrics(workspace.uninterrupted, run)["best_epoch"] >= 2


def test_recipe_resumes_along_its_path_and_in_the_planned_phase(workspace, tmp_path, monkeypatch):
    """A process that resumes takes over the plan, however fast its machine is."""
    planned: list[bool] = []

    def epoch_seconds(_context: object, *, flip: bool) -> float:
        planned.append(flip)
        return 400.0

    monkeypatch.setattr("tasks.train.plan._epoch_seconds", epoch_seconds)
    train = workspace.settings(recipe="auto", max_epochs=1, max_seconds=1000, monitor="auto")
    interruptions = [
        Interruption("terminated", STEPS + 3, leaves=(1, 1, 18)),
        Interruption("killed", 5 + STEPS + 2, leaves=(2, 3, 0), repeated=2),
        Interruption("terminated", 2 * STEPS + 3, leaves=(5, 5, 18)),
        Interruption("terminated in validation", 5, leaves=(5, 5, 45)),
    ]
    run, rank = check_resumed(workspace, train, interruptions, tmp_path)

    assert len(planned) == 2, "once for each of the two runs"
    assert rank.epochs == list(range(5 + 2))
    metrics = run_metrics(workspace.uninterrupted, run)
    assert metrics["best_val_calibrated_loss"] == min(
        loss for _step, loss in logged_metrics(workspace.uninterrupted, run)["val_calibrated_loss"]
    )


def test_checkpoint_of_an_earlier_release_resumes_in_a_later_phase(workspace, tmp_path):
    """It has neither plan nor phases, and its average and best weights are those of the phase."""
    train = workspace.settings(
        max_epochs=1,
        learning_rate=1e-5,
        ema_decay=0.5,
        fine_tune=[FineTunePhase(unfreeze_from="conv5", learning_rate=1e-3, max_epochs=2)],
    )

    def make_rank(interruption: Interruption | None) -> CountingRank:
        for path in workspace.interrupted.checkpoints.glob("*/step-01-*.pt"):
            content = torch.load(path, weights_only=True)
            content = {name: value for name, value in content.items() if name not in {"plan", "phases"}}
            torch.save(content, path)
        return CountingRank(interruption)

    interruptions = [Interruption("terminated", 2 * STEPS + 3, leaves=(1, 2, 18))]
    check_resumed(workspace, train, interruptions, tmp_path, make_rank)


def test_full_network_resumes_with_the_same_augmented_images(workspace, tmp_path):
    """Crops, flips and mixup partners are drawn per step, and are the same in every process."""
    train = workspace.settings(
        weights="none",
        freeze_backbone=False,
        max_epochs=3,
        augmentation=AugmentationConfig(flip=True, resized_crop=0.5, mixup=0.4),
    )
    interruptions = [
        Interruption("terminated", 11, leaves=(0, 1, 18)),
        Interruption("killed", 5 + 3, leaves=(0, 2, 0), repeated=3),
    ]
    check_resumed(workspace, train, interruptions, tmp_path)


def test_float16_resumes_with_the_scale_of_the_loss(workspace, tmp_path, monkeypatch):
    """A scale that is too large falls in the first steps, which are left out; a process that resumes continues it."""
    monkeypatch.setattr("torch.amp.GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**18, growth_interval=3))
    train = workspace.settings(
        weights="none", freeze_backbone=False, max_epochs=2, precision="fp16", sampling="balanced"
    )
    interruptions = [
        Interruption("terminated", 3, leaves=(0, 0, 18)),
        Interruption("killed", 5 + 3, leaves=(0, 1, 0), repeated=3),
    ]
    check_resumed(workspace, train, interruptions, tmp_path)


def test_plateau_schedule_resumes_with_the_same_learning_rate(workspace, tmp_path):
    """The schedule counts the epochs of all starts; `min_delta` is so large that no epoch is an improvement."""
    settings = {"schedule": "plateau", "plateau_epochs": 1, "min_delta": 10.0, "scale_learning_rate": "none"}
    train = workspace.settings(max_epochs=4, **settings)
    interruptions = [
        Interruption("terminated", 2 * STEPS + 3, leaves=(0, 2, 18)),
        Interruption("killed", 5 + 2, leaves=(0, 3, 0), repeated=2),
    ]
    run, _rank = check_resumed(workspace, train, interruptions, tmp_path)

    rates = [rate for _step, rate in logged_metrics(workspace.uninterrupted, run)["learning_rate"]]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5])


def test_one_cycle_schedule_resumes_while_it_rises_and_while_it_falls(workspace, tmp_path):
    """The learning rate is a function of the step, counted over all starts."""
    train = workspace.settings(max_epochs=3, schedule="one_cycle")
    interruptions = [
        Interruption("terminated", 5, leaves=(0, 0, 30)),
        Interruption("killed", 3 + STEPS + 2, leaves=(0, 2, 0), repeated=2),
    ]
    check_resumed(workspace, train, interruptions, tmp_path)


def test_resumed_run_keeps_the_table_that_it_began_with(workspace, tmp_path):
    """A run has one table in parameters, tags, datasets and card, though its cache is then asked for by another one."""
    began, asked = (TableRef(path=f"/{name}/images", version=3, table_id=name) for name in ("began", "asked"))
    specs = [
        TrainingSpec(
            train=workspace.settings(max_epochs=2, seed=8),
            cache=workspace.cache.model_copy(update={"table": table}),
            storage=workspace.interrupted,
        )
        for table in (began, asked)
    ]
    with pytest.raises(Killed):
        train_model(specs[0], CountingRank(Interruption("killed", STEPS + 2, leaves=(0, 1, 0))))
    run = train_model(specs[1])

    found = mlflow.MlflowClient(tracking_uri=workspace.interrupted.tracking).get_run(run.run_id)
    names = ("table", "version", "table_id")
    assert [found.data.params[f"data.{name}"] for name in names] == ["/began/images", "3", "began"]
    assert found.data.tags["lakevision.table_id"] == "began"
    assert {json.loads(of.dataset.source)["path"] for of in found.inputs.dataset_inputs} == {"/began/images"}
    card = read_artifact(workspace.interrupted, run, "model_card.md")
    assert b"/began/images" in card
    assert b"/asked/images" not in card


def train_counted(workspace, storage, train, interruption=None):
    """Train, and return the MLflow run and the number of steps."""
    rank = CountingRank(interruption)
    run = train_model(TrainingSpec(train=train, cache=workspace.cache, storage=storage), reducer=rank)
    return run, rank.steps


@pytest.mark.parametrize("schedule", ["constant", "plateau"])
def test_more_epochs_continue_a_finished_run_in_a_run_of_their_own(workspace, tmp_path, schedule):
    """Weights and metrics equal those of a run with as many epochs from the start; the finished run stays as it is."""
    settings = {"schedule": schedule, "plateau_epochs": 1, "min_delta": 10.0, "scale_learning_rate": "none", "seed": 21}
    storage, plain = workspace.interrupted, workspace.uninterrupted
    short, long = (workspace.settings(max_epochs=epochs, **settings) for epochs in (2, 4))
    whole, whole_steps = train_counted(workspace, plain, long)
    first, first_steps = train_counted(workspace, storage, short)
    before = logged_metrics(storage, first)

    # Killed in its second half, and continued by a third process.
    with pytest.raises(Killed):
        train_counted(workspace, storage, long, Interruption("killed", STEPS + 2, leaves=(0, 3, 0)))
    run, steps = train_counted(workspace, storage, long)

    assert (whole_steps, first_steps, steps) == (4 * STEPS, 2 * STEPS, STEPS)
    assert run.run_id != first.run_id
    weights = logged_weights(storage, run, tmp_path)
    assert same_tensors(weights, logged_weights(plain, whole, tmp_path))
    assert logged_metrics(storage, run) == logged_metrics(plain, whole)
    assert logged_metrics(storage, first) == before
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert client.get_run(run.run_id).data.tags[CONTINUES_TAG] == first.run_id
    assert client.get_run(run.run_id).data.params["train.max_epochs"] == "4"
    assert train_counted(workspace, storage, long) == (run, 0)
    assert train_counted(workspace, storage, short) == (first, 0)


def test_more_epochs_of_a_run_that_was_stopped_early_end_at_once(workspace):
    """Patience is used up in the longer run, too; a decaying schedule starts again, as each of its steps differs."""
    settings = {"min_delta": 10.0, "patience": 1, "scale_learning_rate": "none", "seed": 22}
    steps = {
        (schedule, epochs): train_counted(
            workspace, workspace.interrupted, workspace.settings(max_epochs=epochs, schedule=schedule, **settings)
        )[1]
        for schedule in ("constant", "cosine")
        for epochs in (3, 5)
    }

    assert steps == {
        ("constant", 3): 2 * STEPS,
        ("constant", 5): 0,
        ("cosine", 3): 2 * STEPS,
        ("cosine", 5): 2 * STEPS,
    }


def test_runs_of_older_releases_under_another_key_are_resumed_and_found(workspace):
    """Their key has the number of threads; the run resumes with another number, in the same MLflow run."""
    storage, train = workspace.interrupted, workspace.settings(max_epochs=2, seed=23)
    spec = TrainingSpec(train=train, cache=workspace.cache, storage=storage)
    with pytest.raises(Killed):
        train_counted(workspace, storage, train, Interruption("killed", STEPS + 2, leaves=(0, 1, 0)))
    own, older = spec.keys
    (storage.checkpoints / own).rename(storage.checkpoints / older)
    (path,) = (storage.checkpoints / older).glob("step-*.pt")
    content = torch.load(path, weights_only=True)
    content["config"]["train"]["num_threads"] = 1
    torch.save(content, path)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    client.set_tag(content["run_id"], "lakevision.key", older)

    run, steps = train_counted(workspace, storage, train)

    assert (run.run_id, steps) == (content["run_id"], STEPS)
    client.set_tag(run.run_id, "lakevision.key", older)
    assert train_counted(workspace, storage, train) == (run, 0)


def test_threads_do_not_change_a_head_on_cached_features(workspace, make_home, tmp_path):
    """The key of the run leaves them out, since the weights are bit-identical, also with batches that threads share."""
    workspace = replace(workspace, cache=coloured_cache(str(tmp_path / "large"), rows={TRAIN: 300, VAL: 9, TEST: 9}))
    states = []
    for num_threads in (1, 2, 4):
        train = workspace.settings(max_epochs=2, seed=24, num_threads=num_threads, batch_size=256)
        storage = make_home(f"threads-{num_threads}")
        run, _steps = train_counted(workspace, storage, train)
        states.append(logged_weights(storage, run, tmp_path / str(num_threads)))
    assert same_tensors(states[0], states[1])
    assert same_tensors(states[0], states[2])


def test_automatic_batch_size_stays_on_resume(workspace, tmp_path, monkeypatch):
    """A resumed process with less memory keeps the batch size, and with it the order of the images."""
    train = workspace.settings(max_epochs=2, batch_size="auto")
    steps = 23  # 45 images in batches of 2: the largest power of two with at least 20 steps per epoch

    largest = iter([1024, 1024, 1])

    def make_rank(interruption):
        monkeypatch.setattr("tasks.model.precision.MAX_AUTO_BATCH", next(largest))
        return CountingRank(interruption)

    run, rank = check_resumed(
        workspace, train, [Interruption("terminated", steps + 7, leaves=(0, 1, 14))], tmp_path, make_rank
    )

    assert rank.steps == 2 * steps
    tags = mlflow.MlflowClient(tracking_uri=workspace.uninterrupted.tracking).get_run(run.run_id).data.tags
    assert tags[f"{BATCH_SIZE_TAG}0"] == "2"


def test_checkpoint_of_another_run_is_rejected_with_the_differences(workspace, tmp_path):
    """A copied checkpoint does not change its MLflow run; once it is removed, the training run starts anew."""
    storage = workspace.interrupted
    ours, theirs = workspace.settings(max_epochs=1, seed=5), workspace.settings(max_epochs=2, seed=6)
    other = coloured_cache(f"{tmp_path}/other", classes=("blue", "gold"))
    with pytest.raises(Killed):
        train_model(
            TrainingSpec(train=theirs, cache=other, storage=storage),
            reducer=CountingRank(Interruption("killed", STEPS + 1, (0, 1, 0))),
        )
    folders = [
        storage.checkpoints / run_key(train, cache, None) for train, cache in ((theirs, other), (ours, workspace.cache))
    ]
    shutil.copytree(*folders)
    their_run = Checkpoints(folders[0], keep=2, config={}).newest()[1]["run_id"]
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    before = client.get_run(their_run).to_dictionary()

    with pytest.raises(WrongInput) as rejected:
        train_model(TrainingSpec(train=ours, cache=workspace.cache, storage=storage))

    assert str(rejected.value) == (
        f"the checkpoint in '{folders[1]}' is of another training run (classes only in the checkpoint: gold; "
        "classes only in the data: green, red; "
        f"cache is '{other.digest}' in the checkpoint and '{workspace.cache.digest}' now; "
        "train.max_epochs is 2 in the checkpoint and 1 now; train.seed is 6 in the checkpoint and 5 now): "
        "train with its data and settings, or remove the files in that folder to start again"
    )
    assert client.get_run(their_run).to_dictionary() == before
    shutil.rmtree(folders[1])
    epochs = []
    run = train_model(
        TrainingSpec(train=ours, cache=workspace.cache, storage=storage),
        on_epoch=lambda metrics: epochs.append(metrics.epoch),
    )
    assert epochs == [0]
    assert run.run_id != their_run
