"""Training runs that were killed, interrupted, timed out or had a full disk, and their resumed runs."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import mlflow
import psutil
import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.errors import TrackingUnavailable
from tasks.launch.restarts import RankFailed
from tasks.tracking.sender import MetricSender
from tasks.tracking.server import prepare_tracking
from tasks.train.checkpoint import Checkpoints
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.killed_training import runs_in
from tests.builders.processes import rank_processes
from tests.builders.training_runs import SMALL, epochs_in_event_file, train, train_here, weights
from tests.fakes.interrupted_training import coloured_cache
from tests.fakes.small_training import Killed, same_tensors


def ranks_of(storage):
    """Return the ranks among the children of this process, by number; to look at all processes takes seconds."""
    found = rank_processes(storage.home, psutil.Process().children(recursive=True))
    return {int(rank.environ().get("HOROVOD_RANK", "0")): rank for rank in found}


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_run_that_is_killed_and_then_interrupted_resumes_to_the_same_weights(
    storage, make_home, tmp_path, caplog, num_ranks
):
    """A killed rank ends all, interrupted ranks stop after the same step, and the weights are bit-identical.

    The model has batch norm, whose statistics differ between ranks. The moments of a kill are in tests/faults.
    """
    # Epochs of a second: the signal comes within an epoch, and not between two.
    cache = coloured_cache(f"{storage.cache}/larger", rows={"train": 120, "val": 12, "test": 12})
    settings = {
        "model": "shufflenet_v2_x0_5", "max_epochs": 4, "patience": 4, "schedule": "cosine", "batch_size": 4,
        "precision": "fp32",
        # No checkpoint within an epoch, except on SIGTERM.
        "checkpoint_seconds": 86_400,
    }  # fmt: skip
    other = make_home("other")
    undisturbed = weights(train_here(cache, other, num_ranks, **settings), other, tmp_path)

    def kill(event):
        if event["epoch"] == 1:
            ranks_of(storage)[0].kill()

    with pytest.raises(RankFailed, match=r"^rank 0 was ended by signal 9"):
        train(cache, storage, num_ranks, on_event=kill, **settings)
    assert rank_processes(storage.home) == []
    assert [status for _run_id, status in runs_in(storage)] in (["KILLED"], ["FAILED"])
    assert newest_checkpoint(storage)["next_epoch"] >= 1

    events, event_times, ranks = [], [], []

    def terminate(event):
        events.append(event["epoch"])
        event_times.append(time.monotonic())
        # Found early: the next epoch runs meanwhile.
        ranks[:] = ranks or ranks_of(storage).values()
        if event["epoch"] != 3:
            return
        # Well within the last epoch, which takes about as long as the epoch before.
        time.sleep(0.1 * (event_times[-1] - event_times[0]))
        # Twice, as by a machine that shuts down: from the machine, and from the parent that it also terminates.
        for _ in range(2):
            for process in ranks:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            time.sleep(0.01)

    with pytest.raises(RankFailed, match="ended with status 130"):
        train(cache, storage, num_ranks, on_event=terminate, **settings)
    assert events[0] > 1
    left = newest_checkpoint(storage)
    left_at = left["running"]["position"]
    assert left["next_epoch"] == 3
    # Ranks agree about once per second: by then the epoch may be over, but not validated.
    assert 0 < left_at <= (116 if num_ranks is None else 120)

    events = []
    with caplog.at_level(logging.INFO, "lakevision.ranks"):
        run = train(cache, storage, num_ranks, on_event=lambda event: events.append(event["epoch"]), **settings)
    assert f"rank 0: resuming at epoch 3, image {left_at}" in caplog.messages
    assert events == [4]
    resumed = weights(run, storage, tmp_path)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)
    # One MLflow run that has each epoch once.
    assert runs_in(storage) == [(run.run_id, "FINISHED")]
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2, 3]
    assert epochs_in_event_file(run, storage, tmp_path) == [0, 1, 2, 3]
    assert not list(storage.checkpoints.glob("*/*.pt"))


def test_metrics_that_a_killed_process_did_not_send_are_sent_on_resume(cache, storage, monkeypatch):
    """A checkpoint holds the unsent metrics; sent metrics are not sent again."""
    sent = []
    real = MetricSender.send

    def lose_the_second(sender, values, step):
        sent.append(step)
        if step == 1:
            raise SystemError("killed")
        real(sender, values, step)

    settings = SMALL.model_copy(update={"max_epochs": 3})
    monkeypatch.setattr(MetricSender, "send", lose_the_second)
    with pytest.raises(SystemError):
        train_model(TrainingSpec(train=settings, cache=cache, storage=storage))
    monkeypatch.setattr(MetricSender, "send", real)
    run = train_model(TrainingSpec(train=settings, cache=cache, storage=storage))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]


def test_run_without_checkpoints_loses_no_metric(cache, storage, monkeypatch):
    """Metrics are sent after a checkpoint that contains them, and at the end even where the disk stays full."""
    monkeypatch.setattr(Checkpoints, "save", lambda *_: False)
    run = train_model(TrainingSpec(train=SMALL.model_copy(update={"max_epochs": 3}), cache=cache, storage=storage))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]


@pytest.mark.fault
def test_ranks_end_with_the_process_that_started_them(cache, storage, tmp_path):
    """Ranks end even where their parent is killed with SIGKILL and cannot clean up."""
    spec = TrainingSpec(
        train=SMALL.model_copy(update={"max_epochs": 10_000, "patience": 10_000}),
        distributed=DistributedConfig(num_ranks=2),
        cache=cache,
        storage=storage,
    )
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    code = (
        "import sys; from pathlib import Path; from tasks.launch.launcher import launch_ranks;"
        "from tasks.train.spec import TrainingSpec;"
        "spec = TrainingSpec.model_validate_json(Path(sys.argv[1]).read_text());"
        "launch_ranks(spec, lambda event: print('epoch', flush=True))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "spec.json")],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert parent.stdout is not None
    assert parent.stdout.readline().strip() == "epoch"
    ranks = rank_processes(storage.home)
    assert len(ranks) == 2
    parent.kill()
    parent.wait()
    _gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert alive == []


@pytest.mark.fault
def test_run_that_timed_out_is_killed_and_resumes_with_more_time(cache, storage, make_home):
    """A timed-out run leaves a checkpoint and a killed MLflow run, in which the resumed run continues."""
    settings = {"batch_size": 1, "max_epochs": 10_000, "patience": 10_000, "keep_checkpoints": 20}
    for seconds in (15, 30, 60):  # A busy machine needs so long to start.
        with pytest.raises(TimeoutError, match=f"longer than train.timeout_seconds {seconds} "):
            train(cache, storage, timeout_seconds=seconds, **settings)
        if any(storage.checkpoints.glob("*/step-*.pt")):
            break
    assert rank_processes(storage.home) == []
    left = newest_checkpoint(storage)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    experiment = prepare_tracking(storage)
    assert [run.info.status for run in client.search_runs([experiment])] == ["KILLED"]

    spec = TrainingSpec(train=SMALL.model_copy(update=settings), cache=cache, storage=storage)
    epochs = []

    def end_there(metrics):
        epochs.append(metrics.epoch)
        if metrics.epoch == left["next_epoch"]:
            raise Killed

    # In this process, which saves the imports of a rank.
    with pytest.raises(Killed):
        train_model(spec, on_epoch=end_there)
    assert epochs == [left["next_epoch"]]
    (run,) = client.search_runs([experiment])
    assert left["run_id"] == run.info.run_id

    other = make_home("other")
    with pytest.raises(Killed):
        train_model(spec.model_copy(update={"storage": other}), on_epoch=end_there)
    resumed, undisturbed = (after_epochs(left["next_epoch"] + 1, of) for of in (storage, other))
    assert same_tensors(resumed["model"], undisturbed["model"])
    assert [metrics["val_loss"] for metrics in resumed["history"]] == [
        metrics["val_loss"] for metrics in undisturbed["history"]
    ]


def newest_checkpoint(storage):
    """Return the newest checkpoint of the only training run."""
    return torch.load(max(storage.checkpoints.glob("*/step-*.pt")), weights_only=True)


def after_epochs(num_epochs, storage):
    """Return the checkpoint of the only training run after `num_epochs` whole epochs."""
    (found,) = storage.checkpoints.glob(f"*/step-00-{num_epochs:06d}-{0:012d}+*.pt")
    return torch.load(found, weights_only=True)


@pytest.mark.fault
def test_resume_without_tracking_server_fails_in_one_line_and_works_once_it_is_back(
    cache, storage, tmp_path, monkeypatch
):
    """The rank names the server; once it answers, the run resumes from its checkpoint in the same MLflow run."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def kill(event):
        if event["epoch"] == 1:
            for process in rank_processes(storage.home):
                process.send_signal(signal.SIGKILL)

    with pytest.raises(RankFailed, match="was ended by signal 9"):
        train(cache, storage, on_event=kill, max_epochs=3)
    away = storage.model_copy(update={"tracking": "http://127.0.0.1:9"})
    with pytest.raises(TrackingUnavailable, match="^the tracking server 'http://127.0.0.1:9' ") as raised:
        train(cache, away, max_epochs=3)
    assert "\n" not in str(raised.value)
    epochs = []
    # In this process, which saves the imports of a rank.
    run = train_model(
        TrainingSpec(train=SMALL.model_copy(update={"max_epochs": 3}), cache=cache, storage=storage),
        on_epoch=lambda metrics: epochs.append(metrics.epoch),
    )
    assert epochs == list(range(3 - len(epochs), 3))
    assert len(epochs) < 3
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]


def test_run_removes_checkpoints_of_other_runs_older_than_keep_checkpoint_days(cache, storage):
    """Old checkpoint folders are removed, and newer ones stay for a resume; 0 days keeps all."""
    old, newer = (storage.checkpoints / (digit * 16) for digit in "01")
    for folder, days in ((old, 31), (newer, 29)):
        folder.mkdir(parents=True)
        for path in (folder / "step-00-000001-000000000000+.pt", folder):
            path.touch()
            os.utime(path, (time.time() - days * 86_400,) * 2)
    settings = SMALL.model_copy(update={"max_epochs": 1})
    train_model(
        TrainingSpec(train=settings.model_copy(update={"keep_checkpoint_days": 0}), cache=cache, storage=storage)
    )
    assert old.exists()
    train_model(TrainingSpec(train=settings.model_copy(update={"seed": 4}), cache=cache, storage=storage))
    assert not old.exists()
    assert [path.name for path in newer.iterdir()] == ["step-00-000001-000000000000+.pt"]
