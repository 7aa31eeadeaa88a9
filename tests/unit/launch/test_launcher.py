"""What is said before a rank is started, and what it is started with."""

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
from tasks.errors import OutOfTime, WrongInput
from tasks.launch.launcher import Stopped, launch_ranks
from tasks.launch.protocol import EVENT_MARK
from tasks.progress.count import Standing, heard_by
from tasks.refs import CacheRef
from tasks.schema import TEST, TRAIN, VAL
from tasks.storage import Storage
from tasks.system import cores
from tasks.train.spec import TrainingSpec
from tasks.train.sweep import launch_lock

FROM_SCRATCH = TrainConfig(weights="none", freeze_backbone=False, timeout_seconds=1)


def spec_of(train: TrainConfig, cache: CacheRef, storage: Storage, num_ranks: int | None = None) -> TrainingSpec:
    """Return what to train; `num_ranks` None is one process."""
    distributed = None if num_ranks is None else DistributedConfig(num_ranks=num_ranks)
    return TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage)


@pytest.mark.parametrize(
    ("num_ranks", "batch_size", "said"),
    [
        (None, 46, r"^train.batch_size is 46, but the split 'train' has 45 images, .* give at most 45, "),
        (3, 16, r"^train.batch_size is 16 on each of 3 ranks, but the split 'train' has 45 images, .* at most 15, "),
        (46, "auto", r"^distributed.num_ranks is 46, but the split 'train' has 45 images: give at most 45$"),
    ],
)
def test_more_than_the_split_has_is_refused_before_a_rank_is_started(
    make_cache: Callable[..., CacheRef], storage: Storage, num_ranks: int | None, batch_size: object, said: str
) -> None:
    """Not so much as its turn is taken."""
    train = FROM_SCRATCH.model_copy(update={"batch_size": batch_size})
    with pytest.raises(WrongInput, match=said):
        launch_ranks(spec_of(train, make_cache({TRAIN: 45, VAL: 9, TEST: 9}), storage, num_ranks))
    assert not Path(storage.home).exists()


def test_who_waits_too_long_for_the_same_training_is_told(storage: Storage) -> None:
    """In one sentence, which is not retried; and who is asked to stop meanwhile, stops."""
    spec = spec_of(FROM_SCRATCH, CacheRef(url="/nowhere", digest="d" * 64), storage)
    storage.checkpoints.mkdir(parents=True)
    stop = threading.Event()
    with filelock.FileLock(launch_lock(storage.checkpoints / spec.key)):
        with pytest.raises(OutOfTime, match=r"^another process trains exactly this, .* train.timeout_seconds 1: wait"):
            launch_ranks(spec)
        stop.set()
        with pytest.raises(Stopped):
            launch_ranks(spec, stop=stop)


# A rank that says what it was given in place of training.
RANK = f"""#!/bin/sh
echo '{EVENT_MARK}{{"run_id": "'$OMP_NUM_THREADS threads, $CUDA_VISIBLE_DEVICES'"}}'
"""


@pytest.mark.parametrize(
    ("slot", "num_slots", "given"),
    [
        (0, 1, "8 threads, GPU-a,GPU-b"),
        (0, 3, "2 threads, GPU-a"),
        (1, 3, "2 threads, GPU-b"),
        (2, 3, "2 threads, GPU-a"),
    ],
)
def test_trainings_at_once_share_the_cores_and_take_the_gpus_in_turn(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: int, num_slots: int, given: str
) -> None:
    """One that is alone has all of the machine."""
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

    assert run.run_id == given


def test_how_far_a_step_is_in_the_ranks_is_heard_here(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks run backbones over images, and only this process has a page or a terminal."""
    standing = Standing("features", 64, 150, 2.0)
    rank = tmp_path / "rank"
    events = (asdict(standing), {"run_id": "r"})
    rank.write_text("#!/bin/sh\n" + "".join(f"echo '{EVENT_MARK}{json.dumps(event)}'\n" for event in events))
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    train = TrainConfig(weights="none", freeze_backbone=False)
    heard: list[Standing] = []

    with heard_by(heard.append):
        launch_ranks(spec_of(train, CacheRef(url="cache", digest="digest"), storage))

    assert heard == [standing]
