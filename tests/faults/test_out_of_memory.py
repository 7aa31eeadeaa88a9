"""Training runs of which one process has no memory left: by its own error, and by the kernel."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torchvision

from tasks.config.distributed import DistributedConfig
from tasks.config.train import FineTunePhase
from tasks.errors import OutOfMemory
from tasks.launch.failures import RanksLost
from tasks.launch.launcher import launch_ranks
from tasks.launch.rank_process import OUT_OF_MEMORY
from tasks.train.spec import TrainingSpec
from tests.builders.killed_training import TRAIN, own_ranks, pids_of_ranks, runs_beside, runs_in

MARGIN = 192 * 2**20
"""Bytes that the limited process may still allocate; the gradients of all weights take 275 MB.

Less than a few new threads need leads elsewhere: Python waits for a thread that has no memory to start, until the
watchdog ends the ranks, and native code that does not check its allocations crashes.
"""

CGROUPS = Path("/sys/fs/cgroup")

TWO_RANKS = {"horovod": DistributedConfig(num_ranks=2), "torch": DistributedConfig(num_ranks=2, backend="torch")}


@contextmanager
def memory_cgroup(name: str, limit: int) -> Iterator[Path]:
    """Make a memory cgroup of either version with a limit in bytes; yield the file that takes process ids."""
    version_1 = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if version_1 else CGROUPS) / name
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"needs the right to make a memory cgroup: {error}")
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


@pytest.mark.parametrize("kind", ["single process", *TWO_RANKS])
def test_process_without_memory_ends_all_and_the_next_run_completes(cache, storage, tmp_path, kind):
    """The address space of one is limited before the phase that trains all weights: the error names what to change."""
    distributed = TWO_RANKS.get(kind)
    torch.save(torchvision.models.wide_resnet50_2().state_dict(), tmp_path / "weights.pth")
    train = TRAIN.model_copy(
        update={
            "model": "wide_resnet50_2",
            "weights": str(tmp_path / "weights.pth"),
            "freeze_backbone": True,
            "max_epochs": 2,
            "fine_tune": [FineTunePhase(unfreeze_from="all", max_epochs=1)],
        }
    )
    spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=storage)
    victim = 1 if distributed else 0

    def limit(event):
        if event["epoch"] == 1:
            process = psutil.Process(pids_of_ranks()[victim])
            most = process.memory_info().vms + MARGIN
            process.rlimit(psutil.RLIMIT_AS, (most, most))

    with pytest.raises(OutOfMemory, match=rf"^rank {victim} ran out of memory.*: lower train.batch_size, which is 4"):
        launch_ranks(spec, limit)
    assert own_ranks() == []
    assert [status for _run_id, status in runs_in(storage)] == ["FAILED"]
    run = launch_ranks(spec)
    assert runs_beside(run, storage) == [(run.run_id, "FINISHED")]


@pytest.mark.parametrize("kind", ["single process", *TWO_RANKS])
def test_process_that_the_kernel_kills_for_its_memory_is_told(cache, storage, kind):
    """The error says it, and the next run completes it."""
    distributed = TWO_RANKS.get(kind)
    spec = TrainingSpec(train=TRAIN, distributed=distributed, cache=cache, storage=storage)
    victim = 1 if distributed else 0
    with memory_cgroup(f"lakevision-test-{os.getpid()}", 2 * 2**20) as processes:

        def move(event):
            if event["epoch"] == 2:
                processes.write_text(str(pids_of_ranks()[victim]))

        with pytest.raises(RanksLost) as lost:
            launch_ranks(spec, move)
        first, *_, last = str(lost.value).splitlines()
        assert first.startswith(f"rank {victim} was ended by signal 9")
        assert last == OUT_OF_MEMORY
        assert own_ranks() == []
        run = launch_ranks(spec)
    assert runs_beside(run, storage) == [(run.run_id, "FINISHED")]
