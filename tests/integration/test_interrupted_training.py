"""Trainings that were killed, asked to leave, or had no room, and what is left of them."""

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

from tasks import tracking
from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.errors import TrackingAway
from tasks.launch.launcher import RankFailed
from tasks.storage import resolve_storage
from tasks.train.checkpoint import Checkpoints
from tasks.train.run import train_model
from tasks.train.spec import TrainingSpec
from tests.builders.processes import rank_processes
from tests.builders.training_runs import SMALL, epochs_in_event_file, train, train_here, weights
from tests.fakes.interrupted_training import coloured_cache
from tests.fakes.small_training import Killed, same_tensors


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_a_training_killed_after_an_epoch_goes_on_and_ends_with_the_same_weights(cache, storage, tmp_path, num_ranks):
    """Resumed is never stopped, bit for bit, in the same MLflow run, for one process and for two ranks."""
    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    settings = {"max_epochs": 4, "schedule": "cosine"}
    undisturbed = weights(train_here(cache, other, num_ranks, **settings), other, tmp_path)

    def kill(event):
        if event["epoch"] == 2:
            for process in rank_processes(storage.home):
                process.send_signal(signal.SIGKILL)

    with pytest.raises(RankFailed, match="was ended by signal 9"):
        train(cache, storage, num_ranks, on_event=kill, **settings)
    events = []
    run = train(cache, storage, num_ranks, on_event=events.append, **settings)
    assert events[0]["epoch"] > 2
    resumed = weights(run, storage, tmp_path)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)
    assert epochs_in_event_file(run, storage, tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_a_training_asked_to_leave_writes_a_checkpoint_and_goes_on_from_it(storage, tmp_path, caplog, num_ranks):
    """Between two steps, on all ranks after the same one; with batch norm, whose statistics are each rank's own."""
    # Its epochs take a second: a signal comes within one, and not in the moment between two.
    cache = coloured_cache(f"{storage.cache}/larger", rows={"train": 240, "val": 12, "test": 12})
    settings = {
        "model": "shufflenet_v2_x0_5", "max_epochs": 3, "schedule": "cosine", "batch_size": 4, "precision": "fp32",
        # None within an epoch but that of who is asked to leave.
        "checkpoint_seconds": 86_400,
    }  # fmt: skip
    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    undisturbed = weights(train_here(cache, other, num_ranks, **settings), other, tmp_path)
    told_at, ranks = [], []

    def ask_to_leave(event):
        told_at.append(time.monotonic())
        ranks[:] = ranks or rank_processes(storage.home)
        if event["epoch"] != 2:
            return
        # Well within the last epoch, which takes about as long as the one before.
        time.sleep(0.2 * (told_at[1] - told_at[0]))
        # Twice, as by a machine that shuts down: from it, and from their parent, which it asks as well.
        for _ in range(2):
            for process in ranks:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            time.sleep(0.01)

    with pytest.raises(RankFailed, match="ended with status 130"):
        train(cache, storage, num_ranks, on_event=ask_to_leave, **settings)
    left = newest_checkpoint(storage)
    left_at = left["running"]["position"]
    assert left["next_epoch"] == 2
    # Ranks agree about once a second: their epoch may be over by then, and is yet to be validated.
    assert 0 < left_at <= (236 if num_ranks is None else 240)
    events = []
    with caplog.at_level(logging.INFO, "lakevision.ranks"):
        run = train(cache, storage, num_ranks, on_event=events.append, **settings)
    assert f"rank 0: going on at epoch 2, image {left_at}" in caplog.messages
    assert [event["epoch"] for event in events] == [3]
    resumed = weights(run, storage, tmp_path)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    # One run, a continuous curve, no epoch twice.
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]
    assert not list(storage.checkpoints.glob("*/*.pt"))


def test_metrics_that_a_killed_process_did_not_send_are_sent_when_it_goes_on(cache, storage, monkeypatch):
    """They are in the checkpoint; those that were sent are not sent again."""
    sent = []
    real = tracking.MetricSender.send

    def lose_the_second(sender, values, step):
        sent.append(step)
        if step == 1:
            raise SystemError("killed")
        real(sender, values, step)

    settings = SMALL.model_copy(update={"max_epochs": 3})
    monkeypatch.setattr(tracking.MetricSender, "send", lose_the_second)
    with pytest.raises(SystemError):
        train_model(TrainingSpec(train=settings, cache=cache, storage=storage))
    monkeypatch.setattr(tracking.MetricSender, "send", real)
    run = train_model(TrainingSpec(train=settings, cache=cache, storage=storage))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]


def test_a_disk_that_stays_full_loses_no_metric(cache, storage, monkeypatch):
    """Metrics leave with a checkpoint that covers them, and at the end in any case."""
    monkeypatch.setattr(Checkpoints, "save", lambda *_: False)
    run = train_model(TrainingSpec(train=SMALL.model_copy(update={"max_epochs": 3}), cache=cache, storage=storage))
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]


def test_a_failing_rank_ends_the_others(cache, storage):
    """No rank waits for one that is gone."""

    def kill(event):
        rank_processes(storage.home)[-1].send_signal(signal.SIGKILL)

    with pytest.raises(RankFailed):
        train(cache, storage, num_ranks=2, max_epochs=200, patience=200, on_event=kill)
    assert rank_processes(storage.home) == []


def test_ranks_end_with_the_process_that_started_them(cache, storage, tmp_path):
    """Also when it was killed and could clean nothing."""
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


def test_a_training_that_takes_too_long_is_ended_and_goes_on_when_it_is_run_again(cache, storage, tmp_path):
    """With more time, from the checkpoint that it left, in its MLflow run, which was no longer running."""
    settings = {"batch_size": 1, "max_epochs": 10_000, "patience": 10_000, "keep_checkpoints": 20}
    for seconds in (15, 30, 60):  # A machine with other work takes as long to start.
        with pytest.raises(TimeoutError, match=f"longer than train.timeout_seconds {seconds} and was ended"):
            train(cache, storage, timeout_seconds=seconds, **settings)
        if any(storage.checkpoints.glob("*/step-*.pt")):
            break
    assert rank_processes(storage.home) == []
    left = newest_checkpoint(storage)
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    experiment = tracking.prepare_tracking(storage)
    assert [run.info.status for run in client.search_runs([experiment])] == ["KILLED"]

    events = []

    def end_after_an_epoch(event):
        events.append(event["epoch"])
        raise Killed

    with pytest.raises(Killed):
        train(cache, storage, on_event=end_after_an_epoch, **settings)
    assert events == [left["next_epoch"] + 1]
    (run,) = client.search_runs([experiment])
    assert left["run_id"] == run.info.run_id

    def end_there(metrics):
        if metrics.epoch == left["next_epoch"]:
            raise Killed

    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    with pytest.raises(Killed):
        train_model(
            TrainingSpec(train=SMALL.model_copy(update=settings), cache=cache, storage=other), on_epoch=end_there
        )
    resumed, undisturbed = (after_epochs(left["next_epoch"] + 1, of) for of in (storage, other))
    assert same_tensors(resumed["model"], undisturbed["model"])
    assert [metrics["val_loss"] for metrics in resumed["history"]] == [
        metrics["val_loss"] for metrics in undisturbed["history"]
    ]


def newest_checkpoint(storage):
    """Return the newest checkpoint of the one training."""
    return torch.load(max(storage.checkpoints.glob("*/step-*.pt")), weights_only=True)


def after_epochs(num_epochs, storage):
    """Return the checkpoint of the one training between the epochs."""
    (found,) = storage.checkpoints.glob(f"*/step-00-{num_epochs:06d}-{0:012d}+*.pt")
    return torch.load(found, weights_only=True)


def test_a_training_whose_server_is_away_when_it_is_run_again_is_told_in_one_sentence(
    cache, storage, tmp_path, monkeypatch
):
    """By the rank that asks for its run; with the server back it goes on from its checkpoint, in the same run."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def kill(event):
        if event["epoch"] == 1:
            for process in rank_processes(storage.home):
                process.send_signal(signal.SIGKILL)

    with pytest.raises(RankFailed, match="was ended by signal 9"):
        train(cache, storage, on_event=kill, max_epochs=3)
    away = storage.model_copy(update={"tracking": "http://127.0.0.1:9"})
    with pytest.raises(TrackingAway, match=r"^the tracking server 'http://127.0.0.1:9' does not answer \(") as told:
        train(cache, away, max_epochs=3)
    assert "\n" not in str(told.value)
    events = []
    run = train(cache, storage, on_event=events.append, max_epochs=3)
    assert [event["epoch"] for event in events] == list(range(4 - len(events), 4))
    assert len(events) < 3
    client = mlflow.MlflowClient(tracking_uri=storage.tracking)
    assert [metric.step for metric in client.get_metric_history(run.run_id, "val_loss")] == [0, 1, 2]


def test_a_training_removes_the_checkpoints_of_others_that_were_given_up_long_ago(cache, storage):
    """And leaves those that somebody may yet go on from."""
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
