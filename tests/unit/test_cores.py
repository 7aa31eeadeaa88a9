"""What of a machine a process takes."""

import os
from pathlib import Path

import pytest

from tasks import cores
from tasks.cores import num_cores, share_of_gpus


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000\n", 8), ("150000 100000\n", 2), ("1000 100000\n", 1), ("6400000 100000\n", 8)]
)
def test_a_container_has_the_cores_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    """Rounded up, never none, and no more than the process is bound to."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    assert num_cores() == expected


def test_without_a_control_group_the_bound_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process bound to some cores has those."""
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "none")
    assert num_cores() == len(os.sched_getaffinity(0))


def test_trainings_at_once_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those the process may see, by their names."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert [share_of_gpus(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]
