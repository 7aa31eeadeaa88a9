"""Slots of concurrent training runs, and the GPUs of their processes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import psutil
import pytest
import torch

from tasks.errors import TimeLimitExceeded, WrongInput
from tasks.system import slots
from tasks.system.cores import gpu_names
from tasks.system.slots import Slot, share_of_gpus, take_gpus, take_slot, try_to_take_gpus
from tests.builders.processes import ROOT


def test_concurrent_slots_get_gpus_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots get the visible GPUs in order, by their names."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    gpus = [share_of_gpus(Slot(number, lock=7)) for number in range(3)]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in gpus] == ["GPU-a", "GPU-b", "GPU-a"]
    assert [one.locks for one in gpus] == [(7,)] * 3


HOLDER = """
import sys
from tasks.system.slots import take_slot
with take_slot(sys.argv[1:]) as slot:
    print(slot.number, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def _slots_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a folder of slots that no other process on this machine uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextmanager
def started(program: str, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a program in a separate process until the end of the block, and yield the first line that it prints."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@contextmanager
def holder(*gpus: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Hold a slot in a separate process."""
    with started(HOLDER, *gpus) as (process, number):
        yield process, int(number)


@pytest.mark.usefixtures("_slots_of_its_own")
def test_processes_acquire_the_first_free_slot() -> None:
    """Each process gets the first free slot, and the slot of a killed process is free at once."""
    with holder() as (first, slot), holder() as (_, next_slot):
        assert (slot, next_slot) == (0, 1)
        with take_slot([]) as third:
            assert third.number == 2
        first.kill()
        first.wait()
        with take_slot([]) as again:
            assert again.number == 0


@pytest.mark.usefixtures("_slots_of_its_own")
def test_every_gpu_gets_a_training_run_before_any_gets_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if workers see different GPUs of the machine, and if the names contain slashes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a/1,GPU-b")
    gpus = gpu_names()
    with holder(*gpus) as (_, slot), take_slot(gpus) as second, take_slot(gpus) as third:
        assert [share_of_gpus(taken).names for taken in (Slot(slot, lock=7), second, third)] == [
            ("MIG-a/1",),
            ("GPU-b",),
            ("MIG-a/1",),
        ]
        with take_slot(["GPU-c"]) as elsewhere, take_slot(["GPU-b"]) as shared, take_slot([]) as on_the_cpu:
            assert [one.number for one in (elsewhere, shared, on_the_cpu)] == [0, 1, 0]


@pytest.mark.usefixtures("_slots_of_its_own")
def test_slots_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the shared temporary folder that another user has created is refused."""
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(WrongInput, match="lakevision-slots-2147483648' belongs"), take_slot([]):
        pass


@pytest.mark.usefixtures("_slots_of_its_own")
def test_gpu_has_one_lock_by_its_number_and_by_its_uuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also by the beginning of the UUID; a GPU that torch does not see is locked by its name."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("tasks.system.cores.DEVICES", tmp_path)
    uuids = ["8932f937-d72c-4106-c12f-20bd9faed9f6", "11bb22cc-d72c-4106-c12f-20bd9faed9f6"]

    def visible() -> list[str]:
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        found = [
            [uuid for uuid in uuids if name in (str(uuids.index(uuid)), f"GPU-{uuid}"[: len(name)])] for name in names
        ]
        return [uuid for (uuid,) in found]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible()))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=UUID(visible()[number]))
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with take_gpus(["0"], 1, 0.1) as own, ExitStack() as held:
        assert own.names == ("0",)
        for names in (f"GPU-{uuids[0]}", f"GPU-{uuids[1]},GPU-{uuids[0]}", "GPU-8932"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
            assert try_to_take_gpus([names.split(",")[-1]], 1, held) is None
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert try_to_take_gpus(["1"], 1, held) is not None


RANKS = """
import sys
from tasks.system.slots import take_gpus
with take_gpus(sys.argv[2:], int(sys.argv[1]), 600) as gpus:
    print(*gpus.names, flush=True)
    sys.stdin.read()
"""

FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


@contextmanager
def ranks(num_ranks: int, *gpus: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Hold GPUs for ranks in a separate process."""
    with started(RANKS, str(num_ranks), *gpus) as (process, names):
        yield process, names.split()


@pytest.mark.usefixtures("_slots_of_its_own")
def test_runs_of_several_ranks_have_gpus_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Two runs of two ranks share no GPU; a third one waits, and gets the GPUs of a killed one."""
    with ranks(2, *FOUR) as (first, its_gpus), ranks(2, *FOUR) as (_, other_gpus):
        assert (its_gpus, other_gpus) == (["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"])

        def end_first() -> None:
            first.kill()
            first.wait()

        with caplog.at_level("INFO", "lakevision.ranks"), take_gpus(FOUR, 2, 600, end_first) as third:
            assert third.names == ("GPU-a", "GPU-b")
        assert caplog.messages == [
            "waiting for 2 GPUs of 4 on this machine, which other training runs, or ranks that have not ended, use"
        ]


@pytest.mark.usefixtures("_slots_of_its_own")
def test_ranks_take_no_gpu_of_a_single_process_and_it_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process takes another GPU than ranks have, and ranks a GPU that no process uses, also as its second."""
    monkeypatch.setattr(slots, "POLL_SECONDS", 0.01)
    with take_slot(FOUR) as single, ranks(2, *FOUR) as (_, its_gpus), take_slot(FOUR) as another:
        assert (single.number, its_gpus, another.number) == (0, ["GPU-b", "GPU-c"], 3)
        with (
            pytest.raises(TimeLimitExceeded, match=r"for 0 s, and this one needs a GPU of 4"),
            take_gpus(FOUR, 1, 0.1),
        ):
            pass
    with take_slot(["GPU-a"]), take_slot(["GPU-a"]) as second:
        assert second.number == 1
        with take_gpus(("GPU-a", "GPU-b"), 1, 0.1) as own:
            assert own.names == ("GPU-b",)


@pytest.mark.usefixtures("_slots_of_its_own")
def test_single_process_waits_while_ranks_have_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not share the memory of their GPUs, and takes the first one once they have ended."""
    monkeypatch.setattr(slots, "POLL_SECONDS", 0.01)
    with ranks(2, "GPU-a", "GPU-b") as (process, _):
        with pytest.raises(TimeLimitExceeded), take_slot(["GPU-a", "GPU-b"], 0.1):
            pass
        with take_slot([]) as on_the_cpu:
            assert on_the_cpu.number == 0
        process.kill()
        process.wait()
        with take_slot(["GPU-a", "GPU-b"], 60) as slot:
            assert slot.number == 0


@pytest.mark.usefixtures("_slots_of_its_own")
def test_wait_for_gpus_can_be_interrupted() -> None:
    """An error of the caller's check ends the wait, and no lock is left."""

    def interrupt() -> None:
        raise InterruptedError

    with ranks(1, "GPU-a", "GPU-b"):
        with pytest.raises(InterruptedError), take_gpus(["GPU-a", "GPU-b"], 2, 600, interrupt):
            pass
        with take_gpus(["GPU-a", "GPU-b"], 1, 0.1) as own:
            assert own.names == ("GPU-b",)


INHERITED = """
import subprocess, sys
from contextlib import ExitStack
from tasks.system.slots import try_to_take_gpus
held = ExitStack()
child = subprocess.Popen(["sleep", "600"], pass_fds=try_to_take_gpus(["GPU-a"], 1, held).locks)
if sys.argv[1] == "released":
    held.close()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("_slots_of_its_own")
@pytest.mark.parametrize("taker", ["killed", "released"])
def test_gpu_is_in_use_until_the_last_process_on_it_has_ended(taker: str) -> None:
    """Also after a kill of the process that acquired it, or the end of its block: ranks may outlive SIGKILL a while."""
    with started(INHERITED, taker) as (process, line):
        child = psutil.Process(int(line))
        if taker == "killed":
            process.kill()
            process.wait()
        try:
            with ExitStack() as held:
                assert try_to_take_gpus(["GPU-a"], 1, held) is None
        finally:
            child.kill()
        with take_gpus(["GPU-a"], 1, 60) as own:
            assert own.names == ("GPU-a",)
