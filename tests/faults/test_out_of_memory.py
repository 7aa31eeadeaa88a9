"""Training runs of which one process has no memory left: by its own error, and by the kernel."""

import os
import threading

import psutil
import pytest
import torch
import torchvision

from tasks.config.distributed import DistributedConfig
from tasks.config.storage import StorageConfig
from tasks.config.train import FineTunePhase
from tasks.errors import OutOfMemory
from tasks.launch.launcher import launch_ranks
from tasks.launch.rank_process import OUT_OF_MEMORY
from tasks.launch.restarts import RanksLost
from tasks.storage import resolve_storage
from tasks.train.spec import TrainingSpec
from tests.builders.killed_training import (
    TRAIN,
    has_no_running,
    logged_epochs,
    own_ranks,
    pids_of_ranks,
    runs_beside,
    runs_in,
)
from tests.builders.memory_limits import memory_cgroup
from tests.builders.training_runs import weights
from tests.faults.conftest import at_most

MARGIN = 192 * 2**20
"""Bytes that the limited process may still allocate; the gradients of all weights take 275 MB.

Less than a few new threads need leads elsewhere: Python waits for a thread that has no memory to start, until the
watchdog ends the ranks, and native code that does not check its allocations crashes.
"""

TWO_RANKS = {"horovod": DistributedConfig(num_ranks=2), "torch": DistributedConfig(num_ranks=2, backend="torch")}


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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "rounds"), [("single process", 6), ("horovod", 7), ("torch", 7)])
def test_process_that_the_kernel_kills_for_its_memory_is_told_in_twenty_rounds(
    cache, storage, tmp_path, draw, kind, rounds
):
    """At random moments: the error says it, no process is left, and the next run has the undisturbed weights."""
    distributed = TWO_RANKS.get(kind)
    train = TRAIN.model_copy(update={"max_epochs": 40, "patience": 40})
    other = resolve_storage(StorageConfig(home=str(tmp_path / "other")))
    undisturbed = launch_ranks(TrainingSpec(train=train, distributed=distributed, cache=cache, storage=other))
    expected = weights(undisturbed, other, tmp_path)
    for number in range(at_most(rounds)):
        own = resolve_storage(StorageConfig(home=f"{tmp_path}/home-{number}"))
        spec = TrainingSpec(train=train, distributed=distributed, cache=cache, storage=own)
        victim, epoch, seconds = draw.randrange(spec.num_ranks), draw.randrange(1, 15), draw.uniform(0, 0.5)
        with memory_cgroup(f"lakevision-test-{os.getpid()}", 2 * 2**20) as processes:

            def move(processes=processes, victim=victim):
                processes.write_text(str(pids_of_ranks()[victim]))

            def move_after(event, move=move, epoch=epoch, seconds=seconds):
                if event["epoch"] == epoch:
                    threading.Timer(seconds, move).start()

            with pytest.raises(RanksLost) as lost:
                launch_ranks(spec, move_after)
            first, *_, last = str(lost.value).splitlines()
            print(f"round {number}, {seconds:.2f} s after epoch {epoch}: {first}")
            assert first.startswith(f"rank {victim} was ended by signal 9")
            assert last == OUT_OF_MEMORY
            assert own_ranks() == []
        assert has_no_running(own)
        run = launch_ranks(spec)
        found = weights(run, own, tmp_path)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert logged_epochs(run, own) == list(range(train.max_epochs))
        assert runs_beside(run, own) == [(run.run_id, "FINISHED")]
