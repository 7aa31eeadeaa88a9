"""What of a machine a process takes."""

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


@pytest.mark.parametrize(
    ("most", "taken", "expected"),
    [("max", 10, 8000), ("5000", 1000, 4300), ("5000", 5300, 0), ("90000", 1000, 8000)],
)
def test_a_container_has_the_memory_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, taken: int, expected: int
) -> None:
    """With what old files have of it, and no more than the machine has free."""

    class Memory:
        available = 8000

    monkeypatch.setattr("tasks.system.cores.psutil.virtual_memory", Memory)
    monkeypatch.setattr(cores, "MEMORY_GROUP", tmp_path)
    assert free_memory() == 8000
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text(f"{taken}\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 50\ninactive_file 300\n")
    assert free_memory() == expected


def test_trainings_at_once_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those the process may see, by their names."""
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
    """Let nothing else on this machine have a slot."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextmanager
def holder(*gpus: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Have a slot in a process of its own."""
    command = [sys.executable, "-c", HOLDER, *gpus]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.usefixtures("_slots_of_its_own")
def test_trainings_of_other_processes_take_the_next_slots() -> None:
    """The first that is free; that of a process that was killed is free at once."""
    with holder() as (first, slot), holder() as (_, next_slot):
        assert (slot, next_slot) == (0, 1)
        with take_slot([]) as third:
            assert third == 2
        first.kill()
        first.wait()
        with take_slot([]) as again:
            assert again == 0


@pytest.mark.usefixtures("_slots_of_its_own")
def test_every_gpu_gets_a_training_before_one_gets_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where workers see other GPUs of the machine than each other, under names with slashes in them."""
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
def test_a_folder_of_slots_that_is_another_users_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder for everybody, somebody may have made it."""
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(WrongInput, match="lakevision-slots-2147483648' belongs to another user"), take_slot([]):
        pass
