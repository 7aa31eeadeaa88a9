"""Checks before ranks start, and their environment and events."""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import filelock
import pytest

from tasks.config.distributed import DistributedConfig
from tasks.config.train import TrainConfig
from tasks.errors import TimeLimitExceeded, WrongInput
from tasks.launch.launcher import Stopped, launch_ranks
from tasks.launch.protocol import EVENT_MARK
from tasks.progress.count import StepProgress, listener
from tasks.refs import CacheRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.storage import Storage
from tasks.system import cores
from tasks.train.spec import TrainingSpec
from tasks.train.sweep import launch_lock

FROM_SCRATCH = TrainConfig(weights="none", freeze_backbone=False, timeout_seconds=1)


def spec_of(train: TrainConfig, cache: CacheRef, storage: Storage, num_ranks: int | None = None) -> TrainingSpec:
    """Return a specification; `num_ranks` None is a single process."""
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks)
    return TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage)


@pytest.mark.parametrize(
    ("num_ranks", "batch_size", "message"),
    [
        (None, 46, r"^train.batch_size is 46, but the split 'train' has 45 images, .* give at most 45, "),
        (3, 16, r"^train.batch_size is 16 on each of 3 ranks, but the split 'train' has 45 images, .* at most 15, "),
        (46, "auto", r"^distributed.num_ranks is 46, but the split 'train' has 45 images: give at most 45$"),
    ],
)
def test_batch_larger_than_the_split_is_rejected_before_ranks_start(
    make_cache: Callable[..., CacheRef], storage: Storage, num_ranks: int | None, batch_size: object, message: str
) -> None:
    """Too many ranks or too large a batch are rejected before the lock is acquired."""
    train = FROM_SCRATCH.model_copy(update={"batch_size": batch_size})
    with pytest.raises(WrongInput, match=message):
        launch_ranks(spec_of(train, make_cache({TRAIN: 45, VAL: 9, TEST: 9}), storage, num_ranks))
    assert not Path(storage.home).exists()


def test_waiting_for_the_same_run_times_out(storage: Storage) -> None:
    """Waiting for a process with the same run ends with TimeLimitExceeded, or with Stopped once `stop` is set."""
    spec = spec_of(FROM_SCRATCH, CacheRef(url="/nowhere", digest="d" * 64), storage)
    storage.checkpoints.mkdir(parents=True)
    stop = threading.Event()
    with filelock.FileLock(launch_lock(storage.checkpoints / spec.key)):
        with pytest.raises(
            TimeLimitExceeded, match=r"^another process is training the same run, .* train.timeout_seconds 1: wait"
        ):
            launch_ranks(spec)
        stop.set()
        with pytest.raises(Stopped):
            launch_ranks(spec, stop=stop)


# A rank that reports its environment instead of training.
RANK = f"""#!/bin/sh
echo '{EVENT_MARK}{{"run_id": "'$OMP_NUM_THREADS threads, $CUDA_VISIBLE_DEVICES'"}}'
"""


@pytest.mark.parametrize(
    ("slot", "num_slots", "resources"),
    [
        (0, 1, "8 threads, GPU-a,GPU-b"),
        (0, 3, "2 threads, GPU-a"),
        (1, 3, "2 threads, GPU-b"),
        (2, 3, "2 threads, GPU-a"),
    ],
)
def test_concurrent_runs_share_cores_and_gpus(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: int, num_slots: int, resources: str
) -> None:
    """Concurrent runs share the cores and get the GPUs round-robin, and a single run has them all."""
    rank = tmp_path / "rank"
    rank.write_text(RANK)
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    train = TrainConfig(weights="none", freeze_backbone=False)
    cache = CacheRef(url="cache", digest="digest")

    run = launch_ranks(
        TrainingSpec(train=train, distributed=None, cache=cache, storage=storage, slot=slot, num_slots=num_slots)
    )

    assert run.run_id == resources


def test_progress_of_ranks_is_reported_in_this_process(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress events of a rank reach the listeners in the launcher's process."""
    progress = StepProgress("features", 64, 150, 2.0)
    rank = tmp_path / "rank"
    events = (asdict(progress), {"run_id": "r"})
    rank.write_text("#!/bin/sh\n" + "".join(f"echo '{EVENT_MARK}{json.dumps(event)}'\n" for event in events))
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    train = TrainConfig(weights="none", freeze_backbone=False)
    reports: list[StepProgress] = []

    with listener(reports.append):
        launch_ranks(spec_of(train, CacheRef(url="cache", digest="digest"), storage))

    assert reports == [progress]
