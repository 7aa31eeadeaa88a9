"""What a rank is started with."""

import os
import sys
from pathlib import Path

import pytest

from tasks import cores
from tasks.config import TrainConfig
from tasks.distributed.launch import launch_ranks
from tasks.distributed.rank import EVENT_MARK, RankSpec
from tasks.refs import CacheRef
from tasks.storage import Storage

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
        RankSpec(train=train, distributed=None, cache=cache, storage=storage, slot=slot, num_slots=num_slots)
    )

    assert run.run_id == given
