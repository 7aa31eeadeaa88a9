"""Training runs resumed or repeated with other code, packages or hardware: warnings, tags and model card."""

import logging
from pathlib import Path

import mlflow
import pytest
import torch

from tasks.checks.original_run import read_training
from tasks.checks.repeat import repeat_training
from tasks.config.train import TrainConfig
from tasks.model import device
from tasks.refs import RunRef
from tasks.tracking.runs import RESUMED_WITH_CHANGES_TAG, package_versions, read_artifact
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec, run_key
from tests.fakes.interrupted_training import STEPS, CountingRank, Interruption, Workspace, make_workspace
from tests.fakes.small_training import Killed

LOGGER = "lakevision.train"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Workspace:
    """Return the workspace of all tests here; cached features of one run are used by the next."""
    return make_workspace(tmp_path_factory.mktemp("gone-on"), empty_tracking)


def card(workspace: Workspace, run: RunRef) -> str:
    """Return the model card of a run."""
    content = read_artifact(workspace.interrupted, run, "model_card.md")
    assert content is not None
    return content.decode()


@pytest.fixture
def other_provenance(tmp_path, monkeypatch):
    """Return a context with other packages, code, processor and number of cores than after `undo`."""
    package = tmp_path / "packages" / "torch-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 6\nmodel\t\t: 1\nmodel name\t: Pentium Pro\n")
    monkeypatch.setenv("LAKEVISION_CODE_VERSION", "second")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as context:
        context.syspath_prepend(package.parent)
        context.setattr(device, "CPU_INFO", info)
        context.setenv("LAKEVISION_CODE_VERSION", "first")
        context.setenv("OMP_NUM_THREADS", "2")
        yield context


def kill_in_the_second_epoch(workspace: Workspace, train: TrainConfig) -> None:
    """Start a training run, and leave a checkpoint of its first epoch."""
    killed = CountingRank(interruption=Interruption("killed", STEPS + 1, leaves=(0, 1, 0)))
    with pytest.raises(Killed):
        train_model(TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted), reducer=killed)


def resume_changes(workspace: Workspace, run: RunRef) -> str | None:
    """Return the tag with the changes since the start of a resumed run."""
    client = mlflow.MlflowClient(tracking_uri=workspace.interrupted.tracking)
    changes: str | None = client.get_run(run.run_id).data.tags.get(RESUMED_WITH_CHANGES_TAG)
    return changes


def test_run_resumed_with_other_provenance_logs_and_tags_the_changes(workspace, other_provenance, messages_of):
    """Changes are logged before the next step, tagged on the run and read for a repetition; training resumes."""
    train = workspace.settings(max_epochs=2, num_threads=0, seed=21)
    kill_in_the_second_epoch(workspace, train)
    other_provenance.undo()
    rank = CountingRank()
    changed = (
        f"the processor was Pentium Pro (family 6, model 1) and is {device.processor_name(torch.device('cpu'))}; "
        "the number of threads was 2 and is 1; the code was first and is second; "
        f"torch was 1.0 and is {package_versions()['torch']}"
    )
    warning = f"training resumes with changes: {changed}; the weights may match those of neither environment"
    warned_before_step = []
    rank.after_step = lambda: warned_before_step.append(warning in messages_of(LOGGER))

    run = train_model(TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted), reducer=rank)

    assert rank.steps == STEPS  # Those of the second epoch: the first is not repeated.
    assert all(warned_before_step)
    assert resume_changes(workspace, run) == changed
    first = read_training(run.run_id, workspace.interrupted)
    assert (first.code_version, first.versions["torch"], first.num_threads) == ("first", "1.0", 2)
    assert first.resumed_with_changes == changed
    assert f"| changed when resumed | `{changed}` |" in card(workspace, run)


def test_run_resumed_without_changes_has_no_warning(workspace, messages_of):
    """Log, run and model card have no changes."""
    train = workspace.settings(max_epochs=2, num_threads=0, seed=22)
    kill_in_the_second_epoch(workspace, train)

    run = train_model(TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted))

    assert resume_changes(workspace, run) is None
    assert "changed when resumed" not in card(workspace, run)
    assert not [line for line in messages_of(LOGGER) if "resumes with changes" in line]


def test_checkpoint_of_another_device_is_resumed_and_the_change_tagged(workspace, messages_of):
    """Its provenance has only device and precision; everything else is compared with the tags of its run."""
    train = workspace.settings(max_epochs=2, seed=23)
    kill_in_the_second_epoch(workspace, train)
    (path,) = (workspace.interrupted.checkpoints / run_key(train, workspace.cache, None)).glob("step-*.pt")
    torch.save(
        torch.load(path, weights_only=True) | {"provenance": {"the device": "cuda", "the precision": "bfloat16"}}, path
    )

    run = train_model(TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted))

    assert resume_changes(workspace, run) == "the device was cuda and is cpu; the precision was bfloat16 and is float32"


def test_run_killed_before_its_first_checkpoint_tags_a_changed_number_of_threads(
    workspace, other_provenance, messages_of
):
    """MLflow parameters are immutable: the run is tagged; other code or packages would create a new run."""
    train = workspace.settings(max_epochs=1, num_threads=0, seed=24)
    other_provenance.setenv("OMP_NUM_THREADS", "1")
    killed = CountingRank(interruption=Interruption("killed", 1, leaves=(0, 0, 0)))
    with pytest.raises(Killed):
        train_model(TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted), reducer=killed)
    other_provenance.setenv("OMP_NUM_THREADS", "2")

    run = train_model(TrainingSpec(train=train, cache=workspace.cache, storage=workspace.interrupted))

    assert resume_changes(workspace, run) == "the number of threads was 1 and is 2"
    assert [line for line in messages_of(LOGGER) if line.endswith("the MLflow parameters are those of the first start")]


def test_repetition_logs_differences_before_it_trains(workspace, monkeypatch, caplog):
    """Device, processor, precision, threads, packages and code are compared before training, which may take hours."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = train_model(
        TrainingSpec(
            train=workspace.settings(max_epochs=1, seed=25), cache=workspace.cache, storage=workspace.interrupted
        )
    )
    trained = read_training(run.run_id, workspace.interrupted)
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
        report = repeat_training(trained.model_copy(update=before), workspace.cache, workspace.interrupted, {})

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
    assert report.weights_equal  # Only logged values were changed.
    first_line_of_a_rank = next(number for number, line in enumerate(caplog.messages) if line.startswith("rank 0: "))
    logged = [line.removeprefix("changed since the original run: ") for line in caplog.messages[:first_line_of_a_rank]]
    assert [line for line in logged if line in expected] == expected
