"""Cores, memory and GPUs that a process may use."""

import os
import sys
from pathlib import Path

import pytest

from tasks.system import cores
from tasks.system.cores import free_memory, gpu_names, num_cores


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000\n", 8), ("150000 100000\n", 2), ("1000 100000\n", 1), ("6400000 100000\n", 8)]
)
def test_container_gets_the_cores_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    """The number of cores is the quota, rounded up, at least 1 and at most the size of the affinity mask."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    assert num_cores() == expected


def test_process_without_control_group_gets_its_affinity_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a quota, the number of cores is the size of the affinity mask."""
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "none")
    assert num_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [("max", 10, 8000), ("5000", 1000, 4300), ("5000", 5300, 0), ("90000", 1000, 8000)],
)
def test_container_gets_the_memory_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: int, expected: int
) -> None:
    """Free memory is the unused part of the limit plus the inactive page cache, at most the machine's free memory."""

    class Memory:
        available = 8000

    monkeypatch.setattr("tasks.system.cores.psutil.virtual_memory", Memory)
    monkeypatch.setattr(cores, "MEMORY_GROUP", tmp_path)
    assert free_memory() == 8000
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{usage}\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 50\ninactive_file 300\n")
    assert free_memory() == expected


def test_machine_without_device_files_of_gpus_loads_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher of ranks starts without it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cores, "DEVICES", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    assert gpu_names() == []
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ImportError):
        gpu_names()
