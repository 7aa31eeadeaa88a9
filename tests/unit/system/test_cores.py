"""Cores, memory and GPUs that a process may use."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.errors import WrongInput
from tasks.system import cores
from tasks.system.cores import free_memory, gpu_names, num_cores, share_of_gpus, take_slot
from tests.builders.processes import ROOT


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


def test_concurrent_slots_get_gpus_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots get the visible GPUs in order, by their names."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert [share_of_gpus(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]


HOLDER = """
import sys
from tasks.system.cores import take_slot
with take_slot(sys.argv[1:]) as slot:
    print(slot, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def _slots_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a folder of slots that no other process on this machine uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextmanager
def holder(*gpus: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Hold a slot in a separate process."""
    command = [sys.executable, "-c", HOLDER, *gpus]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.usefixtures("_slots_of_its_own")
def test_processes_acquire_the_first_free_slot() -> None:
    """Each process gets the first free slot, and the slot of a killed process is free at once."""
    with holder() as (first, slot), holder() as (_, next_slot):
        assert (slot, next_slot) == (0, 1)
        with take_slot([]) as third:
            assert third == 2
        first.kill()
        first.wait()
        with take_slot([]) as again:
            assert again == 0


@pytest.mark.usefixtures("_slots_of_its_own")
def test_every_gpu_gets_a_training_run_before_any_gets_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if workers see different GPUs of the machine, and if the names contain slashes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a/1,GPU-b")
    gpus = gpu_names()
    with holder(*gpus) as (_, slot), take_slot(gpus) as second, take_slot(gpus) as third:
        assert [share_of_gpus(taken)["CUDA_VISIBLE_DEVICES"] for taken in (slot, second, third)] == [
            "MIG-a/1",
            "GPU-b",
            "MIG-a/1",
        ]
        with take_slot(["GPU-c"]) as elsewhere, take_slot(["GPU-b"]) as shared, take_slot([]) as on_the_cpu:
            assert (elsewhere, shared, on_the_cpu) == (0, 1, 0)


@pytest.mark.usefixtures("_slots_of_its_own")
def test_slots_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the shared temporary folder that another user has created is refused."""
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(WrongInput, match="lakevision-slots-2147483648' belongs to another user"), take_slot([]):
        pass
