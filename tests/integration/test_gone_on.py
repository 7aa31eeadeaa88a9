"""Trainings that are gone on with, or repeated, otherwise than they were begun: what is said of it, and where."""

import logging
from pathlib import Path

import mlflow
import pytest
import torch

from tasks import tracking
from tasks.config.train import TrainConfig
from tasks.model import device
from tasks.refs import RunRef
from tasks.repeat.original_run import read_training
from tasks.repeat.repeat import repeat_training
from tasks.train.identity import run_key
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.fakes.interrupted_training import STEPS, CountingRank, Ground, Interruption, make_ground
from tests.fakes.small_training import Killed

# petastorm leaves its Parquet files to the reference count to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

LOGGER = "lakevision.train"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Ground:
    """Return what all trainings here share; features that one has made the next one finds."""
    return make_ground(tmp_path_factory.mktemp("gone-on"), empty_tracking)


def card(ground: Ground, run: RunRef) -> str:
    """Return the model card that a run logged."""
    content = tracking.read_artifact(ground.interrupted, run, "model_card.md")
    assert content is not None
    return content.decode()


@pytest.fixture
def begun_otherwise(tmp_path, monkeypatch):
    """Return a context in which packages, code, processor and cores are others than after it."""
    package = tmp_path / "packages" / "torch-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 6\nmodel\t\t: 1\nmodel name\t: Pentium Pro\n")
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as then:
        then.syspath_prepend(package.parent)
        then.setattr(device, "CPU_INFO", info)
        then.setenv("LAKEVISION_CODE_VERSION", "first")
        then.setenv("OMP_NUM_THREADS", "2")
        yield then


def kill_within_the_second_epoch(ground: Ground, train: TrainConfig) -> None:
    """Begin a training, and leave a checkpoint of its first epoch."""
    killed = CountingRank(interruption=Interruption("killed", STEPS + 1, leaves=(0, 1, 0)))
    with pytest.raises(Killed):
        train_model(TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted), reducer=killed)


def note_on(ground: Ground, run: RunRef) -> str | None:
    """Return what a run says that was not as it was begun."""
    client = mlflow.MlflowClient(tracking_uri=ground.interrupted.tracking)
    note: str | None = client.get_run(run.run_id).data.tags.get(tracking.RESUMED_WITH_CHANGES_TAG)
    return note


def test_a_training_gone_on_with_by_other_packages_code_processor_and_threads_says_so(ground, begun_otherwise, messages_of):
    """In the log before its next step and on its run, and whoever would repeat it reads it; its weights are kept."""
    train = ground.settings(max_epochs=2, num_threads=0, seed=21)
    kill_within_the_second_epoch(ground, train)
    begun_otherwise.undo()
    rank = CountingRank()
    changed = (
        f"the processor was Pentium Pro (family 6, model 1) and is {device.processor_name(torch.device('cpu'))}; "
        "the number of threads was 2 and is 1; the code was first and is second; "
        f"torch was 1.0 and is {tracking.package_versions()['torch']}"
    )
    warning = f"this training goes on otherwise than it was begun: {changed}; its weights may be those of neither"
    steps_told = []
    rank.after_step = lambda: steps_told.append(warning in messages_of(LOGGER))

    run = train_model(TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted), reducer=rank)

    assert rank.steps == STEPS  # Of the second epoch: nothing of the first is thrown away.
    assert all(steps_told)
    assert note_on(ground, run) == changed
    first = read_training(run.run_id, ground.interrupted)
    assert (first.code_version, first.versions["torch"], first.num_threads) == ("first", "1.0", 2)
    assert first.resumed_with_changes == changed
    assert f"| changed on the way | `{changed}` |" in card(ground, run)


def test_a_training_gone_on_with_as_it_was_begun_says_nothing(ground, messages_of):
    """Neither in the log nor on its run."""
    train = ground.settings(max_epochs=2, num_threads=0, seed=22)
    kill_within_the_second_epoch(ground, train)

    run = train_model(TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted))

    assert note_on(ground, run) is None
    assert "changed on the way" not in card(ground, run)
    assert not [line for line in messages_of(LOGGER) if "goes on otherwise" in line]


def test_a_checkpoint_of_before_is_gone_on_from_and_another_device_is_named(ground, messages_of):
    """It says device and number format in one text; the rest is compared with what its run said."""
    train = ground.settings(max_epochs=2, seed=23)
    kill_within_the_second_epoch(ground, train)
    (path,) = (ground.interrupted.checkpoints / run_key(train, ground.cache, None)).glob("step-*.pt")
    torch.save(torch.load(path, weights_only=True) | {"provenance": "cuda in bfloat16"}, path)

    run = train_model(TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted))

    assert note_on(ground, run) == "the device was cuda and is cpu; the precision was bfloat16 and is float32"


def test_a_run_begun_with_other_threads_and_killed_before_its_first_checkpoint_says_so(ground, begun_otherwise, messages_of):
    """Its parameters cannot be changed; one begun by other code or packages is left as it is, and another is made."""
    train = ground.settings(max_epochs=1, num_threads=0, seed=24)
    begun_otherwise.setenv("OMP_NUM_THREADS", "1")
    killed = CountingRank(interruption=Interruption("killed", 1, leaves=(0, 0, 0)))
    with pytest.raises(Killed):
        train_model(TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted), reducer=killed)
    begun_otherwise.setenv("OMP_NUM_THREADS", "2")

    run = train_model(TrainingSpec(train=train, cache=ground.cache, storage=ground.interrupted))

    assert note_on(ground, run) == "the number of threads was 1 and is 2"
    assert [line for line in messages_of(LOGGER) if line.endswith("its parameters say how it was begun")]


def test_a_repetition_names_what_is_different_before_it_trains(ground, monkeypatch, caplog):
    """Device, processor, number format, threads, packages and code: who sees it at the end has trained for nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = train_model(
        TrainingSpec(train=ground.settings(max_epochs=1, seed=25), cache=ground.cache, storage=ground.interrupted)
    )
    trained = read_training(run.run_id, ground.interrupted)
    versions = trained.versions | {"torch": "1.0"}
    before = {
        "device": "cuda:0",
        "processor": "H200",
        "precision": "bfloat16",
        "num_threads": 9,
        "code_version": "first",
        "versions": versions,
        "resumed_with_changes": "numpy was 1 and is 2",
    }
    with caplog.at_level(logging.INFO, "lakevision"):
        report = repeat_training(trained.model_copy(update=before), ground.cache, ground.interrupted, {})

    expected = [
        "the device was cuda and is cpu",
        f"the processor was H200 and is {trained.processor}",
        "the precision was bfloat16 and is float32",
        "the number of threads was 9 and is 1",
        f"the code was first and is {trained.code_version}",
        f"torch was 1.0 and is {trained.versions['torch']}",
        f"MLflow run {run.run_id} was resumed with changes: numpy was 1 and is 2",
    ]
    assert report.differences == expected
    assert report.weights_equal  # In truth nothing was different.
    first_of_a_rank = next(number for number, line in enumerate(caplog.messages) if line.startswith("rank 0: "))
    told = [line.removeprefix("changed since the original run: ") for line in caplog.messages[:first_of_a_rank]]
    assert [line for line in told if line in expected] == expected
