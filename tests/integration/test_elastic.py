"""Distributed training that loses ranks and continues, with as many ranks or with fewer."""

import os
import re
import signal

import mlflow
import pytest
import torch

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.errors import HostLost
from tasks.launch import launcher
from tasks.launch.launcher import launch_ranks
from tasks.launch.restarts import RanksLost
from tasks.storage import resolve_storage
from tasks.tracking.runs import RESTARTS_TAG, run_metrics
from tasks.train.spec import TrainingSpec
from tests.builders.killed_training import (
    killed_at_checkpoints,
    logged_epochs,
    own_ranks,
    pids_of_ranks,
    runs_beside,
)
from tests.builders.training_runs import ROUNDED, weights
from tests.fakes.interrupted_training import coloured_cache

# Its network has dropout, whose random numbers are those of the lost rank.
TRAIN = ROUNDED.model_copy(update={"learning_rate": 1e-4, "batch_size": 2, "max_epochs": 6, "patience": 6})
ROWS = {"train": 30, "val": 6, "test": 6}

RESTART = re.compile(
    r"rank (\d) was ended by signal 9: restarting (\d ranks?) from the checkpoint at epoch (\d+), image (\d+) "
    r"\(restart (\d) of 2\)"
)


def test_run_that_loses_a_rank_and_a_host_equals_the_undisturbed_one(storage, tmp_path, monkeypatch, caplog):
    """It continues with two ranks, then with one, in one MLflow run with each epoch once; ranks show their stacks."""
    cache = coloured_cache(f"{storage.cache}/small", rows=ROWS)
    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    settings = DistributedConfig(num_ranks=2, min_ranks=1, max_restarts=2)
    spec = TrainingSpec(train=TRAIN, distributed=settings, cache=cache, storage=storage)

    def show_stacks(_event: object) -> None:
        for process in pids_of_ranks().values():
            os.kill(process, signal.SIGUSR1)  # as the launcher does for a rank that has stalled

    with caplog.at_level("INFO", "lakevision.ranks"):
        undisturbed = launch_ranks(spec.model_copy(update={"storage": other}), show_stacks)
    for rank in (0, 1):
        assert [
            message for message in caplog.messages if re.match(rf"rank {rank}: .*\(most recent call first\)", message)
        ]
    losses = iter((0, 1))
    # The second loss is that of a host: its rank does not start again.
    monkeypatch.setattr(
        launcher, "RanksLost", lambda message: HostLost(message, "gone", [0]) if next(losses) else RanksLost(message)
    )

    with killed_at_checkpoints(spec, (1, 0)) as kills:
        run = launch_ranks(spec)

    told = [found for message in caplog.messages if (found := RESTART.fullmatch(message))]
    assert [found.group(1, 2, 5) for found in told] == [("1", "2 ranks", "1"), ("0", "1 rank", "2")]
    # Another checkpoint may have been written before the rank ended.
    assert [(int(found[3]), int(found[4])) >= kill for found, kill in zip(told, kills, strict=True)] == [True, True]
    found, expected = weights(run, storage, tmp_path), weights(undisturbed, other, tmp_path)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name
    # It began at 0: how far training has moved the weights.
    assert expected["network.features.0.bias"].abs().max() > 1e-5
    metrics = run_metrics(storage, run)
    assert metrics["best_val_loss"] == pytest.approx(run_metrics(other, undisturbed)["best_val_loss"], rel=1e-6)
    assert logged_epochs(run, storage) == list(range(TRAIN.max_epochs))
    assert runs_beside(run, storage) == [(run.run_id, "FINISHED")]
    tags = mlflow.MlflowClient(tracking_uri=storage.tracking).get_run(run.run_id).data.tags
    assert tags[RESTARTS_TAG] == "2"
    assert own_ranks() == []
    assert not list(storage.checkpoints.glob("*/*.pt"))
